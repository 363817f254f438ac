"""Which experts the routers of a mixture choose for each token: recorded, compared and replayed.

A router scores all experts and takes the best few. Two passes with equal weights round otherwise,
so that near-ties end otherwise, and a token goes through other experts: its log-probability then
differs by far more than rounding. So what samples records the choice, and the learner replays it
(routing replay, arXiv 2510.11370): the experts are given, and their weights are made from the
router's own scores, with their gradient, as the architecture makes them.

All architectures but ``OTHERWISE`` take their experts with ``topk``. Inside a router that call is
seen by a torch function mode, which is of the thread that computes. So several passes can go
through a model at once, and layers that are computed again in a backward pass get the same choice.
Torch only.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

ROUTER = re.compile("(Router|Gate|Gating)$")  # how the classes of routers end
BLOCKS = ("JambaSparseMoeBlock",)  # blocks that choose for themselves
OTHERWISE = {  # routers that choose without ``topk``, so that nothing is recorded or replayed
    "PhimoeTopKRouter": "which take the largest score twice",
    "DogeCDMoE": "which make experts of pairs of keys",
}
BY_TOKEN = ("DeepseekV4HashRouter",)  # the token's id decides: every pass chooses alike
COUNTS = ("num_router_classes", "n_routed_experts", "num_experts")  # keys: experts to choose from
CHOSEN = ("top_k", "top_k_experts")  # keys: how many of them a token gets
GROUPS = ("num_group", "n_group", "num_expert_group")  # keys: groups that experts are limited to
UNKNOWN = -1  # in place of the experts of a token whose choice nobody has recorded
TOPK = (torch.topk, Tensor.topk)
MASKED = (torch.masked_fill, Tensor.masked_fill)


class Router(NamedTuple):
    """A module that chooses ``chosen`` of ``experts`` experts for each token."""

    module: Any
    experts: int
    chosen: int
    grouped: bool  # whether it scores groups of experts first


class RoutedShape(NamedTuple):
    """The shape of what is chosen for one token, and the smallest type of torch for it."""

    routers: int
    chosen: int  # of the router that chooses most
    kind: torch.dtype


def routers_of(model: Any) -> list[Router]:
    """Return the routers of a model that are known here, in the order of its modules."""
    return [
        Router(module, experts, chosen, bool(_number(module, GROUPS)))
        for module in model.modules()
        if _routes(type(module).__name__)
        and (experts := _number(module, COUNTS))
        and (chosen := _number(module, CHOSEN))
    ]


def _routes(name: str) -> bool:
    if name in OTHERWISE or name in BY_TOKEN:
        return False
    return name in BLOCKS or bool(ROUTER.search(name))


def _number(module: Any, names: Sequence[str]) -> int:
    """Return a number of a module or of its config, by the first of the names that is one."""
    for place in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int):
                return value
    return 0


def not_known(model: Any) -> str:
    """Return which routers of a model choose in a way that is not known here, or ""."""
    names = {type(module).__name__ for module in model.modules()} & OTHERWISE.keys()
    return ", ".join(f"{name}, {OTHERWISE[name]}" for name in sorted(names))


def shape_of(routers: Sequence[Router]) -> RoutedShape | None:
    """Return the shape of a token's choice; None for a model without routers."""
    if not routers:
        return None
    most = max(router.experts for router in routers)
    chosen = max(router.chosen for router in routers)
    return RoutedShape(len(routers), chosen, torch.uint8 if most <= 256 else torch.int16)


# ---------------------------------------------------------------- what a pass does with choices

# Takes a router's number and what it would choose, [tokens, chosen]; returns what it has to take.
Chooser = Callable[[int, Tensor], Tensor]
_CHOOSER: ContextVar[Chooser | None] = ContextVar("chooser of experts", default=None)


class Recording:
    """Notes what routers choose in one pass."""

    def __init__(self, shape: RoutedShape) -> None:
        self.shape = shape
        self.by_router: dict[int, Tensor] = {}

    def __call__(self, number: int, own: Tensor) -> Tensor:
        self.by_router[number] = own
        return own

    def taken(self) -> Tensor:
        """Return the choice [tokens, routers, chosen]; where a router has fewer, with its first."""
        width = self.shape.chosen
        every = [self.by_router[number] for number in range(self.shape.routers)]
        wide = [
            torch.cat([one, one[:, :1].expand(-1, width - one.shape[1])], 1)
            if one.shape[1] < width
            else one
            for one in every
        ]
        return torch.stack(wide, 1).to(self.shape.kind)


class Replay:
    """Gives routers a recorded choice, and counts where they would have chosen other experts.

    ``given`` [tokens, routers, chosen] has ``UNKNOWN`` where nothing is recorded: the router
    chooses there. Where ``forced`` is false it chooses everywhere, and is counted alone.
    """

    def __init__(
        self, given: Tensor, forced: bool = True, counted: Sequence[Tensor] | None = None
    ) -> None:
        self.given, self.forced = given, forced
        self.differing, self.pairs = counted or given.new_zeros(2, dtype=torch.int64).unbind()

    def at(self, tokens: Tensor) -> Replay:
        """Return the choice of some tokens, in another order; negative indices are of none."""
        given = self.given[tokens.clamp(min=0)]
        given = given.masked_fill((tokens < 0)[:, None, None], UNKNOWN)
        return Replay(given, self.forced, (self.differing, self.pairs))

    def measuring(self) -> Replay:
        """Return one that counts, and leaves every choice to the routers."""
        return Replay(self.given, forced=False)

    @property
    def share(self) -> float:
        """Return the share of (token, router) pairs for which other experts would be chosen."""
        return float(self.differing) / max(1, int(self.pairs))

    def __call__(self, number: int, own: Tensor) -> Tensor:
        recorded = self.given[:, number, : own.shape[1]].long()
        if len(recorded) != len(own):
            raise ValueError(
                f"router {number} chooses for {len(own)} tokens, and the recorded choice is of "
                f"{len(recorded)}: this architecture has no routing replay"
            )
        known = recorded[:, :1] != UNKNOWN
        with torch.no_grad():
            apart = differ(own, recorded) & known[:, 0]
            self.differing += apart.sum()
            self.pairs += known.sum()
        return torch.where(known, recorded, own) if self.forced else own


def differ(one: Tensor, other: Tensor) -> Tensor:
    """Return whether sets of experts [..., chosen] differ, in whatever order. [...]"""
    return (one.sort(-1).values != other.sort(-1).values).any(-1)


@contextmanager
def using(model: Any, chooser: Chooser | None) -> Iterator[None]:
    """Ask ``chooser`` for every choice of a model's routers in this thread; None: leave them be.

    Raises ValueError for a recorded choice of other routers than the model's.
    """
    if chooser is None:
        yield
        return
    if isinstance(chooser, Replay):
        _check_of_model(chooser, model)
    _follow(model)
    with _asking(chooser):
        yield


def _check_of_model(replay: Replay, model: Any) -> None:
    """Raise ValueError where a recorded choice is not of a model's routers."""
    shape, recorded = shape_of(routers_of(model)), tuple(replay.given.shape[1:])
    own = shape[:2] if shape else (0, 0)
    if recorded != own:
        raise ValueError(
            f"the trees have the choice of {recorded[0]} routers with {recorded[1]} experts each, "
            f"and {type(model).__name__} has {own[0]} routers with {own[1]}: another policy has "
            "sampled them; collect them anew with this one"
        )


@contextmanager
def _asking(chooser: Chooser) -> Iterator[None]:
    before = _CHOOSER.set(chooser)
    try:
        yield
    finally:
        _CHOOSER.reset(before)


def recomputing() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for a checkpointed layer and its recomputation, which any thread may run."""
    chooser = _CHOOSER.get()
    return nullcontext(), nullcontext() if chooser is None else _asking(chooser)


# ---------------------------------------------------------------- inside a router

_FOLLOWING = threading.Lock()


def _follow(model: Any) -> None:
    """Let the routers of a model ask for their choice from now on, in passes that have a chooser.

    Others compute as before. The routers are numbered in the order of ``routers_of``.
    """
    with _FOLLOWING:
        for number, router in enumerate(routers_of(model)):
            if "forward" not in vars(router.module):
                router.module.forward = partial(_routed, router.module.forward, number)


def _routed(forward: Callable[..., Any], number: int, *args: Any, **kwargs: Any) -> Any:
    """Run a router's own forward pass, with its choice as the chooser of this thread decides."""
    chooser = _CHOOSER.get()
    if chooser is None:
        return forward(*args, **kwargs)
    module = forward.__self__  # type: ignore[attr-defined]
    experts, chosen = _number(module, COUNTS), _number(module, CHOSEN)
    router = Router(module, experts, chosen, bool(_number(module, GROUPS)))
    with _Choosing(router, partial(chooser, number)):
        return forward(*args, **kwargs)


class _Choosing(TorchFunctionMode):
    """Answers a router's ``topk`` over all experts with a choice, and its scores there."""

    def __init__(self, router: Router, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.router, self.choose = router, choose
        self.masked: tuple[Tensor, Tensor] | None = None  # scores of allowed groups, and of all

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if function in MASKED:
            self.masked = found, args[0]
        if function not in TOPK or not self._chooses(args[0], found.indices):
            return found
        own = found.indices.flatten(0, -2)
        chosen = self.choose(own)
        if chosen is own:
            return found
        scores = args[0]
        if self.masked is not None and scores is self.masked[0]:
            scores = self.masked[1]  # those of a group that this pass would not have allowed, too
        indices = chosen.view_as(found.indices)
        return torch.return_types.topk((scores.gather(-1, indices), indices))

    def _chooses(self, scores: Tensor, indices: Tensor) -> bool:
        """Return whether a ``topk`` takes experts; those before it compare groups of them."""
        sized = (scores.shape[-1], indices.shape[-1]) == (self.router.experts, self.router.chosen)
        return sized and not (self.router.grouped and scores.ndim == 3)

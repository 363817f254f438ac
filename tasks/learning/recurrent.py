"""Layers that carry a state from token to token, or convolve over earlier ones, along forests.

Such a layer projects each token by itself, and mixes tokens in two functions of its architecture's
file: a causal convolution over the last few tokens, and a scan that carries a state. Over a forest
(tasks/learning/packing.py) the layer projects all slots at once, and these two go along the trees:
the convolution finds each slot's earlier tokens in its context, and the scan takes chains of slots
in waves, each from the last state of its parent chain (tasks/learning/chains.py). The gradient of a
shared prefix adds up over its branches.

A layer's own code runs, with the two functions exchanged. What they call inside is what
transformers has found: torch, or the kernels of flash-linear-attention, causal-conv1d and mamba-ssm
where these are installed. Padding of chains leaves a state as it is: its decay is 1 and its step 0.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from tasks.learning import chains
from tasks.learning.packing import Forest
from tasks.policy.lean_transformers import transformers

LEAST_CHUNK = 16  # tokens that a scan in chunks computes at once, where its chains are short
Original = Callable[..., Any]
Scan = Callable[[list[Tensor], Tensor | None, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ChainBatch:
    """``chains.Chains`` on a device."""

    slots: Tensor  # [N, T]
    mask: Tensor  # [N, T]
    parents: Tensor  # [N]


@dataclass(frozen=True)
class Plan:
    """How the layers of a model go along a forest."""

    parents: chains.Ints  # [U] on the host
    device: torch.device
    waves: list[list[ChainBatch]]
    places: Tensor  # [U] where each slot is in the rows of all batches, laid end to end
    windows: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def window(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``chains.Windows`` of a convolution on the device."""
        if width not in self.windows:
            found = chains.windows(self.parents, width)
            slots, missing, places = (torch.from_numpy(one).to(self.device) for one in found)
            self.windows[width] = slots, missing, places
        return self.windows[width]


def plan_of(forest: Forest) -> Plan:
    """Cut a forest into chains."""
    device = forest.tokens.device
    parents = forest.layout.parents
    waves = chains.cut_into_waves(parents)
    places: chains.Ints = np.zeros(len(parents), np.int64)
    used = 0
    for each in (batch for wave in waves for batch in wave):
        places[each.slots[each.mask]] = used + np.flatnonzero(each.mask.ravel())
        used += each.mask.size

    def move(array: Any) -> Tensor:
        return torch.from_numpy(array).to(device)

    moved = [
        [ChainBatch(move(each.slots), move(each.mask), move(each.parents)) for each in wave]
        for wave in waves
    ]
    return Plan(parents, device, moved, move(places))


class Along:
    """The forest that each thread is computing, and the plans of forests."""

    def __init__(self) -> None:
        self.current = threading.local()
        self.plans: WeakKeyDictionary[Forest, Plan] = WeakKeyDictionary()

    def begin(self, _: Any, __: Any, given: dict[str, Any]) -> None:
        """Note the forest that a layer is given, also when it is computed again."""
        self.current.forest = given.get("forest")

    def end(self, *_: Any) -> None:
        self.current.forest = None

    def plan(self) -> Plan:
        """Return how to go along the current forest. Raises ValueError without one."""
        forest = getattr(self.current, "forest", None)
        if forest is None:
            raise ValueError(
                "the policy's layers do not get what they are given from their model, so no tree "
                "goes through them: take another policy"
            )
        if forest not in self.plans:
            self.plans[forest] = plan_of(forest)
        return self.plans[forest]


@contextmanager
def going_along(model: Any) -> Iterator[None]:
    """Let the recurrent layers and convolutions of a model go along forests inside this context."""
    along = Along()
    with ExitStack() as stack:
        for parent in model.modules():
            mixers = [each for each in parent.children() if is_mixer(each)]
            for mixer in mixers:
                stack.enter_context(_exchanged(mixer, along))
            if mixers:
                begin = parent.register_forward_pre_hook(along.begin, with_kwargs=True)
                stack.callback(begin.remove)
                stack.callback(parent.register_forward_hook(along.end, always_call=True).remove)
        yield


def is_mixer(module: Any) -> bool:
    """Return whether a layer mixes tokens in a way that this file knows."""
    return type(module).__name__ in WHOLE or bool(_exchangeable(module))


def _exchangeable(module: Any) -> set[str]:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return FORMS.keys() & set(code.co_names) if code else set()


@contextmanager
def _exchanged(mixer: Any, along: Along) -> Iterator[None]:
    """Exchange the functions that mix tokens in a layer's own code; restore the layer after."""
    before = mixer.__dict__.get("forward")
    mixer.forward = _forward(mixer, along)
    try:
        yield
    finally:
        del mixer.forward
        if before is not None:
            mixer.forward = before


def _forward(mixer: Any, along: Along) -> Callable[..., Any]:
    if whole := WHOLE.get(type(mixer).__name__):
        return partial(whole, mixer, along)
    code: Any = inspect.unwrap(type(mixer).forward)
    known = code.__globals__
    forms = {name: partial(FORMS[name], along, known[name]) for name in _exchangeable(mixer)}
    forward = FunctionType(code.__code__, known | forms, argdefs=code.__defaults__)
    forward.__kwdefaults__ = code.__kwdefaults__
    return MethodType(forward, mixer)


# ---------------------------------------------------------------- along the trees


def _convolved(
    along: Along, original: Original, inputs: Tensor, *given: Any, **rest: Any
) -> Tensor:
    """Convolve over each slot and those before it in its context; ``inputs`` [1, channels, U]."""
    weight = given[0] if given else rest["weight"]
    slots, missing, places = along.plan().window(weight.shape[-1])
    rest.pop("forest", None)
    rest.pop("seq_idx", None)
    laid = inputs.transpose(1, 2).index_select(1, slots)
    laid = laid.masked_fill(missing[None, :, None], 0).transpose(1, 2)
    mixed: Tensor = original(laid, *given, **rest)
    return mixed.index_select(-1, places)


def scanned(plan: Plan, inputs: Sequence[Tensor], scan: Scan) -> Tensor:
    """Scan the chains of a forest, wave by wave. [1, U, ...]

    ``inputs`` [1, U, ...] each; ``scan`` takes them for N chains as [N, T, ...], zeros at padding,
    with states [N, ...] (None at the first tokens of contexts) and T, and returns outputs
    [N, T, ...] and last states [N, ...].
    """
    mixed: list[Tensor] = []
    last: Tensor | None = None
    for wave in plan.waves:
        states = []
        for batch in wave:
            given = [_picked(each[0], batch) for each in inputs]
            first = None if last is None else last.index_select(0, batch.parents)
            outputs, state = scan(given, first, batch.slots.shape[1])
            mixed.append(outputs.flatten(0, 1))
            states.append(state)
        last = torch.cat(states)
    return torch.cat(mixed).index_select(0, plan.places)[None]


def _picked(values: Tensor, batch: ChainBatch) -> Tensor:
    """Select chains [N, T, ...] from slots [U, ...], zeros at padding."""
    picked = values.index_select(0, batch.slots.flatten()).unflatten(0, batch.slots.shape)
    mask = batch.mask.view(*batch.mask.shape, *(1 for _ in picked.shape[2:]))
    return picked.masked_fill(~mask, 0)


def _chunk(longest: int, usual: int) -> int:
    """Return how many tokens a scan computes at once: few where all chains are short."""
    return min(usual, max(LEAST_CHUNK, 1 << (longest - 1).bit_length()))


def _delta_rule(
    along: Along,
    original: Original,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool,
    **_: Any,
) -> tuple[Tensor, None]:
    """Scan by the gated delta rule (arXiv 2412.06464, equation 10), or Kimi's (2510.26692).

    query and key [1, U, heads, size], value [1, U, heads, value size], beta [1, U, heads] and the
    logarithm of the decay g [1, U, heads, ...]. A step with g = beta = 0 leaves the state.
    """

    def scan(given: list[Tensor], state: Tensor | None, longest: int) -> tuple[Tensor, Tensor]:
        q, k, v, decay, step = given
        return original(
            q,
            k,
            v,
            g=decay,
            beta=step,
            chunk_size=_chunk(longest, 64),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )

    return scanned(along.plan(), (query, key, value, g, beta), scan), None


def _state_space(
    along: Along,
    original: Original,
    inputs: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """Scan by Mamba 2 (arXiv 2405.21060, section 6). [1, U, heads, size]

    inputs [1, U, heads, size], time steps dt [1, U, heads], A [heads], B and C [1, U, groups,
    states], D [heads]. Time steps are bounded here, so that padding can have the step 0.
    """
    step = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    step = (softplus(step) if dt_softplus else step).clamp(*dt_limit)

    def scan(given: list[Tensor], state: Tensor | None, longest: int) -> tuple[Tensor, Tensor]:
        x, steps, b, c = given
        return original(
            x,
            steps,
            A,
            b,
            c,
            chunk_size=_chunk(longest, chunk_size),
            D=D,
            initial_states=state,
            return_final_states=True,
        )

    return scanned(along.plan(), (inputs, step, B, C), scan)


def _selective(
    along: Along,
    original: Original,
    inputs: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **rest: Any,
) -> Tensor:
    """Scan by Mamba (arXiv 2312.00752, equation 2). [1, channels, U]

    inputs, time steps dt and gates z [1, channels, U], A [channels, states], B and C [1, states,
    U], D [channels]. The function begins with no state, and what a first state adds is added here:
    after t tokens, C_t times the product of their decays times the state.
    """
    step = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    step = softplus(step) if delta_softplus else step
    settings = {key: rest[key] for key in ("use_mambapy", "use_associative_scan") if key in rest}

    def scan(given: list[Tensor], state: Tensor | None, _: int) -> tuple[Tensor, Tensor]:
        x, steps, b, c = (each.transpose(1, 2) for each in given)
        outputs, last = original(x, steps, A, b, c, D=D, return_last_state=True, **settings)
        if state is not None:
            decayed = (A[:, None] * steps.cumsum(-1)[..., None]).exp() * state[:, :, None]
            outputs = outputs + torch.einsum("bdts,bst->bdt", decayed, c.to(decayed.dtype))
            last = last + decayed[:, :, -1]
        return outputs.transpose(1, 2), last

    laid = [each.transpose(1, 2) for each in (inputs, step, B, C)]
    mixed = scanned(along.plan(), laid, scan).transpose(1, 2)
    return mixed if z is None else mixed * silu(z)


def _lightning(
    mixer: Any, along: Along, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Compute MiniMax's lightning attention (arXiv 2501.08313, section 2.2): [1, U, hidden size].

    A head's state is the sum of the products of keys and values, which decays by a constant factor
    a token: Mamba 2's scan with a time step of 1.
    """
    heads, size = mixer.num_attention_heads, mixer.head_dim
    projected = mixer.act_fn(mixer.qkv_proj(hidden_states)).unflatten(-1, (heads, 3 * size))
    query, key, value = projected.split(size, -1)
    step = torch.ones_like(query[..., 0])
    decay = -mixer.slope_rate.flatten().float()
    scan: Original = transformers.models.mamba2.modeling_mamba2.mamba2_chunk_scan
    mixed = _state_space(along, scan, value, step, decay, key, query, mixer.block_size)
    mixed = mixer.norm(mixed.to(value.dtype).flatten(2))
    mixed = torch.sigmoid(mixer.output_gate(hidden_states)) * mixed
    return mixer.out_proj(mixed), None


# functions that mix tokens in the files of architectures -> their form over a forest
FORMS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolved,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba_selective_scan": _selective,
}
# layers that mix tokens in their own code -> their whole pass over a forest
WHOLE: dict[str, Callable[..., Any]] = {"MiniMaxLightningAttention": _lightning}

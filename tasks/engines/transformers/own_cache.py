"""Sessions over transformers' own caches and the model's own attention, for families of any kind.

cache.py holds keys and values in one tensor, which is faster and right for attention to all tokens
or to a window. What else a family carries from token to token, the state of a recurrent layer or of
a convolution, keys and values whose sizes differ by layer, a cache of its own class, is kept here
as transformers makes it. A state has no positions and cannot be cut back: a path keeps it at the
end of each prompt and result that it was fed, and at its own end, and what branches off elsewhere
is fed again from the last of these before.

What is new in a path is fed with what other paths have new, as many tokens of each, and all paths
then decode together, stacked with zeros on the left (states.py), as far as the family allows. A
family that takes a token at a time behind its cache is fed a token of each path at a time.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.engines.contract import Sample, SamplingRequest
from tasks.engines.transformers import prefixes, states
from tasks.engines.transformers.drawing import Drawing, Turns
from tasks.engines.transformers.states import Carried
from tasks.policy import routed_experts
from tasks.trees.tree import common_length

FEED_TOKENS = 8192  # tokens of one prefill pass over several rows: bounds its memory
FEED_ROWS = 16  # that are stacked to be fed, at most: beside all rows that paths keep
NO_TOKENS = np.zeros(0, np.int32)
CACHES = ("past_key_values", "cache_params", "state")  # names of what a pass carries on
Item = TypeVar("Item")


@dataclass(frozen=True)
class Abilities:
    """What a family's own pass can do; each is found out by a test of every family."""

    cached: bool = True  # it goes on from a cache; else the whole context is computed each time
    several: bool = True  # it takes several tokens behind a cache; else one after the other
    padded: bool = True  # it takes rows of different lengths, with their positions; else it counts
    # positions itself, and rows of equal lengths go together


@dataclass(frozen=True)
class Row:
    """What is computed of a context."""

    tokens: NDArray[np.int32]
    held: Any  # a Carried, or a cache of a class that is not known here, or None without a cache
    logits: Tensor | None  # [vocabulary] after the last token; None at the end of a turn
    experts: NDArray[Any] | None = None  # [tokens, routers, chosen] of a mixture's routers


@dataclass(frozen=True)
class Start:
    """Requests with equal tokens, and the longest beginning of these that is computed."""

    requests: list[int]
    tokens: NDArray[np.int32]
    known: Row | None

    @property
    def length(self) -> int:
        return len(self.known.tokens) if self.known else 0

    @property
    def new(self) -> int:
        return len(self.tokens) - self.length


@dataclass(frozen=True)
class Batch:
    """Rows that decode together."""

    contexts: list[NDArray[np.int32]]  # of each row, before its turn
    slots: int  # positions that the cache had before the turn: tokens of the longest context
    cache: Any
    experts: list[list[NDArray[Any]]]  # pieces [tokens, routers, chosen] of each row, up to now

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[rows] tokens of each context."""
        return np.array([len(tokens) for tokens in self.contexts])


class OwnPass:
    """The forward pass of a policy as transformers has it, and what it can do."""

    def __init__(self, model: Any, abilities: Abilities) -> None:
        self.model, self.several = model, abilities.several
        self.takes = set(inspect.signature(model.forward).parameters)
        self.device = model.get_input_embeddings().weight.device
        self.routed = routed_experts.shape_of(routed_experts.routers_of(model))
        self.cached, self.placed = abilities.cached, abilities.padded
        with torch.inference_mode():
            _, cache, _ = self.compute(np.zeros((1, 1), np.int64), np.zeros(1, np.int64))
        self.cached = cache is not None
        # a cache of another class may hold anything, and is copied and used as a whole
        self.stacks = self.cached and states.is_known(cache)
        self.cuts = self.stacks and states.can_be_cut(cache)
        self.pads = abilities.padded and self.stacks and states.can_be_padded(cache)
        self.masks = self.pads and states.has_positions(cache)

    def compute(
        self,
        tokens: NDArray[np.int64],
        starts: NDArray[np.int64],
        padding: NDArray[np.int64] | int = 0,
        cache: Any = None,
    ) -> tuple[Tensor, Any, NDArray[Any] | None]:
        """Compute ``tokens`` [rows, fed] at positions from ``starts`` [rows] on, behind a cache.

        ``padding`` [rows]: positions of the cache in front of each row that hold nothing. Returns
        the logits [rows, vocabulary] of the last tokens, the cache, maybe the same one, and the
        experts [rows, fed, routers, chosen] of a mixture.
        """
        fed = tokens.shape[1]
        given: dict[str, Any] = {"use_cache": self.cached}
        if self.placed and "position_ids" in self.takes:
            given["position_ids"] = self._tensor(starts[:, None] + np.arange(fed))
        if np.any(padding) and self.masks:
            slots = np.arange(int((starts + padding).max()) + fed)
            holds = slots >= np.reshape(padding, (-1, 1))
            given["attention_mask"] = self._tensor(holds.astype(np.int64))
        if "logits_to_keep" in self.takes:
            given["logits_to_keep"] = 1
        if cache is not None:
            given[_carrier(self.takes)] = cache
        recording = routed_experts.Recording(self.routed) if self.routed else None
        with routed_experts.using(self.model, recording):
            output = self.model(input_ids=self._tensor(tokens), **given)
        name = _carrier(output.keys()) if self.cached else ""
        experts = None
        if recording:
            experts = recording.taken().unflatten(0, tokens.shape).cpu().numpy()
        return output.logits[:, -1].float(), output[name] if name else None, experts

    def _tensor(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


class OwnCacheSession:
    """The paths of one batch of dialogues. See ``tasks.engines.contract.SamplingSession``."""

    def __init__(self, own_pass: OwnPass, drawing: Drawing, paths: int) -> None:
        self.own_pass, self.drawing, self.paths = own_pass, drawing, paths
        self.opened = 0
        self.rows: dict[int, tuple[Row, ...]] = {}  # of each path, from short to long

    def open(self) -> int:
        if len(self.rows) == self.paths:
            raise RuntimeError(f"all {self.paths} paths of this session are in use")
        self.opened += 1
        self.rows[self.opened] = ()
        return self.opened

    def fork(self, handle: int) -> int:
        child = self.open()
        self.rows[child] = self.rows[handle]
        return child

    def close(self, handle: int) -> None:
        del self.rows[handle]

    @torch.inference_mode()
    def sample(self, requests: Sequence[SamplingRequest]) -> list[Sample]:
        if not requests:
            return []
        self.drawing.check(requests)
        fed = self._feed_all(requests)
        samples: dict[int, Sample] = {}
        for group in _groups(range(len(requests)), lambda i: self._beside(i, requests[i])):
            turns = self._decode([requests[i] for i in group], [fed[i] for i in group])
            samples |= zip(group, turns, strict=True)
        return [samples[i] for i in range(len(requests))]

    # ---------------------------------------------------------------- what is new in a path

    def _feed_all(self, requests: Sequence[SamplingRequest]) -> list[Row]:
        """Feed what is not computed, once where tokens are equal; return each request's row."""
        fed: dict[int, Row] = {}
        alike = _groups(range(len(requests)), lambda i: requests[i].tokens.tobytes())
        starts = self._feed_shared([self._start(group, requests) for group in alike])
        for start, row in zip(starts, self._feed_each(starts), strict=True):
            fed |= dict.fromkeys(start.requests, row)
        for i, request in enumerate(requests):
            self._keep(request.handle, fed[i])
        return [fed[i] for i in range(len(requests))]

    def _feed_shared(self, starts: list[Start]) -> list[Start]:
        """Feed once what several contexts begin with; return contexts that go on from there.

        Not where a family takes a token at a time behind a cache: whole prompts are faster there.
        """
        if not (self.own_pass.cached and self.own_pass.several):
            return starts
        levels, _ = prefixes.plan([one.tokens for one in starts], [one.length for one in starts])
        for level in levels:
            news = [shared for shared in level if starts[shared.leader].length < shared.end]
            ends = [starts[shared.leader] for shared in news]
            beginnings = [
                Start([], one.tokens[: shared.end], one.known)
                for one, shared in zip(ends, news, strict=True)
            ]
            for shared, row in zip(news, self._feed_each(beginnings), strict=True):
                for index in (shared.leader, *shared.followers):
                    if starts[index].length < shared.end:
                        starts[index] = replace(starts[index], known=row)
        return starts

    def _feed_each(self, starts: Sequence[Start]) -> list[Row]:
        """Feed what is new in each context, as many together as the family allows."""
        rows: dict[int, Row] = {}
        for batch in _groups(range(len(starts)), lambda index: self._fed_with(starts[index])):
            most = max(starts[index].new for index in batch)
            at_once = max(1, min(FEED_ROWS, FEED_TOKENS // most)) if most else len(batch)
            for first in range(0, len(batch), at_once):
                some = batch[first : first + at_once]
                fed = self._feed([starts[index] for index in some])
                rows |= zip(some, fed, strict=True)
        return [rows[index] for index in range(len(starts))]

    def _start(self, alike: list[int], requests: Sequence[SamplingRequest]) -> Start:
        tokens = requests[alike[0]].tokens
        known = [self._known(requests[i], tokens) for i in alike]
        return Start(alike, tokens, max(known, key=lambda row: len(row.tokens) if row else 0))

    def _known(self, request: SamplingRequest, tokens: NDArray[np.int32]) -> Row | None:
        """Return the longest beginning of ``tokens`` that a path has computed."""
        usable = []
        for row in self.rows[request.handle]:
            common = common_length(row.tokens, tokens)
            if common == len(row.tokens) and (common < len(tokens) or row.logits is not None):
                usable.append(row)
            elif self.own_pass.cuts and common > 1:
                length = min(common, len(tokens) - 1)  # the last is fed again, for its logits
                experts = None if row.experts is None else row.experts[:length]
                usable.append(Row(tokens[:length], states.cut(row.held, length), None, experts))
        return max(usable, key=lambda row: len(row.tokens), default=None)

    def _fed_with(self, start: Start) -> Hashable:
        """Return what is equal for contexts that are fed together."""
        if not self.own_pass.stacks:
            return id(start)
        if not (self.own_pass.pads and start.length and start.new):
            return start.length, start.new
        return start.new if self.own_pass.several else None

    def _feed(self, starts: Sequence[Start]) -> list[Row]:
        """Feed what is new in contexts whose beginnings can be stacked."""
        known = [start.known if self.own_pass.cached else None for start in starts]
        if not starts[0].new:
            return [start.known for start in starts if start.known]
        contexts = [row.tokens if row else NO_TOKENS for row in known]
        cache = _cache_of([row.held for row in known if row])
        pieces = [_pieces(row) for row in known]
        batch = Batch(contexts, max(map(len, contexts)), cache, pieces)
        new = [start.tokens[len(old) :] for start, old in zip(starts, contexts, strict=True)]
        rows: dict[int, Row] = {}
        live, fed = np.arange(len(starts)), 0
        while len(live):
            least = min(len(new[i]) for i in live)
            until = least if self.own_pass.several or not batch.slots else fed + 1
            logits, batch = self._computed(batch, np.stack([new[i][fed:until] for i in live]), fed)
            fed = until
            ended = np.array([len(new[i]) == fed for i in live])
            places = np.flatnonzero(ended)
            lengths, slots = batch.lengths[places] + fed, batch.slots + fed
            held = self._held(batch.cache, places, lengths.tolist(), slots) if len(places) else []
            for i, one in zip(places, held, strict=True):
                tokens, experts = starts[live[i]].tokens, _joined(batch.experts[i])
                rows[int(live[i])] = Row(tokens, one, logits[i].clone(), experts)
            if ended.any() and not ended.all():
                batch = self._only(batch, np.flatnonzero(~ended), fed)
            live = live[~ended]
        return [rows[i] for i in range(len(starts))]

    def _computed(self, batch: Batch, new: NDArray[np.int32], fed: int) -> tuple[Tensor, Batch]:
        """Compute ``new`` [rows, tokens] behind the contexts and ``fed`` further tokens."""
        starts, padding = batch.lengths + fed, batch.slots - batch.lengths
        computed = self.own_pass.compute(new.astype(np.int64), starts, padding, batch.cache)
        logits, cache, experts = computed
        return logits, replace(batch, cache=cache, experts=_extended(batch.experts, experts))

    def _held(
        self, cache: Any, rows: Iterable[int], lengths: Sequence[int], slots: int
    ) -> list[Any]:
        """Return what a cache of ``slots`` positions holds of rows of ``lengths`` tokens."""
        if not self.own_pass.stacks:
            return [cache]
        state = states.state_of(cache, slots)
        return [states.row_of(state, *one) for one in zip(rows, lengths, strict=True)]

    def _keep(self, handle: int, row: Row) -> None:
        """Keep a row of a path, and the shorter ones that a branch may need.

        These are the ends of prompts and results. An earlier turn's end lies near the next of them.
        """
        earlier = () if self.own_pass.cuts else self.rows[handle]
        kept = [
            one
            for one in earlier
            if one.logits is not None
            and len(one.tokens) < len(row.tokens)
            and common_length(one.tokens, row.tokens) == len(one.tokens)
        ]
        if self.own_pass.stacks:  # keys and values of the shorter ones are a part of its own
            kept = [replace(one, held=states.shared(one.held, row.held)) for one in kept]
        self.rows[handle] = (*kept, row)

    # ---------------------------------------------------------------- decoding

    def _beside(self, index: int, request: SamplingRequest) -> Hashable:
        """Return what is equal for requests that decode together."""
        if not self.own_pass.stacks:
            return index
        return None if self.own_pass.pads else len(request.tokens)

    def _decode(self, requests: Sequence[SamplingRequest], rows: Sequence[Row]) -> list[Sample]:
        """Sample until every request has stopped, from its row on."""
        turns = Turns(self.drawing, requests, self.own_pass.device)
        contexts = [row.tokens for row in rows]
        cache = _cache_of([row.held for row in rows])
        batch = Batch(contexts, max(map(len, contexts)), cache, [_pieces(row) for row in rows])
        experts: dict[int, NDArray[Any] | None] = {}  # of the requests that have stopped
        logits = torch.stack([row.logits for row in rows if row.logits is not None])
        live = np.arange(len(requests))
        while True:
            done = turns.draw(live, logits, np.arange(len(live)))
            drawn = turns.tokens[live, : turns.step]
            if done:
                experts |= {int(live[i]): _joined(batch.experts[i]) for i in done}
                self._end([requests[i].handle for i in live[done]], batch, done, drawn[:, :-1])
                stay = np.delete(np.arange(len(live)), done)
                live, drawn = live[stay], drawn[stay]
                if not len(live):
                    samples = enumerate(turns.samples())
                    return [replace(sample, experts=experts[i]) for i, sample in samples]
                batch = self._only(batch, stay, turns.step - 1)
            logits, batch = self._advance(batch, drawn)

    def _advance(self, batch: Batch, drawn: NDArray[np.int32]) -> tuple[Tensor, Batch]:
        """Compute the last of the tokens ``drawn`` [rows, step] of each row."""
        if not self.own_pass.cached:
            whole = np.concatenate([batch.contexts[0], drawn[0]])[None].astype(np.int64)
            logits, _, fed = self.own_pass.compute(whole, np.zeros(1, np.int64))
            return logits, replace(batch, experts=_extended([[]], fed))
        return self._computed(batch, drawn[:, -1:], drawn.shape[1] - 1)

    def _end(
        self, handles: Sequence[int], batch: Batch, places: list[int], fed: NDArray[np.int32]
    ) -> None:
        """Keep what is computed of paths that have stopped: all but the last token, never fed.

        ``places``: their rows of the batch; ``fed`` [rows, tokens]: what the cache has of the turn.
        """
        count = fed.shape[1]
        if not count or not self.own_pass.cached:
            return
        tokens = [np.concatenate([batch.contexts[i], fed[i]]) for i in places]
        held = self._held(batch.cache, places, [len(one) for one in tokens], batch.slots + count)
        chosen = [_joined(batch.experts[i]) for i in places]
        for handle, all_of, one, experts in zip(handles, tokens, held, chosen, strict=True):
            self._keep(handle, Row(all_of, one, None, experts))

    def _only(self, batch: Batch, stay: NDArray[np.int64], fed: int) -> Batch:
        """Return a batch of some rows, whose cache has ``fed`` tokens of the turn."""
        rows = torch.from_numpy(stay).to(self.own_pass.device)
        state = states.state_of(batch.cache, batch.slots + fed)
        cache = states.cache_of(states.rows_of(state, rows))
        contexts = [batch.contexts[i] for i in stay]
        experts = [batch.experts[i] for i in stay]
        return replace(batch, contexts=contexts, cache=cache, experts=experts)


def _pieces(row: Row | None) -> list[NDArray[Any]]:
    return [] if row is None or row.experts is None else [row.experts]


def _extended(
    pieces: list[list[NDArray[Any]]], fed: NDArray[Any] | None
) -> list[list[NDArray[Any]]]:
    """Append experts [rows, fed, routers, chosen] of new tokens to the pieces of their rows."""
    for of_row, new in zip(pieces, [] if fed is None else fed, strict=fed is not None):
        of_row.append(new)
    return pieces


def _joined(pieces: list[NDArray[Any]]) -> NDArray[Any] | None:
    return np.concatenate(pieces) if pieces else None


def _carrier(names: Iterable[str]) -> str:
    """Return the name of what a pass carries from token to token, or ""."""
    return next((name for name in CACHES if name in names), "")


def _cache_of(held: Sequence[Any]) -> Any:
    """Return a cache that goes on from what rows hold, and leaves that as it is."""
    if not held or held[0] is None:
        return None
    if isinstance(held[0], Carried):
        return states.cache_of(states.stacked(held))
    return copy.deepcopy(held[0])


def _groups(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Return lists of items with equal keys, in the order of the first of each."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())

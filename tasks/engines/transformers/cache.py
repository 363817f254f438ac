"""The decoding loop of the transformers engine, over a cache whose rows differ in length.

A row of the cache belongs to paths whose tokens are the same so far. It is computed once for all of
them: the prompt, and what they sample until they draw different tokens, where the row is copied
(rows.py). What different prompts begin with is computed once, too (prefixes.py). Rows are not
padded; those that still sample are in front, so that a step computes them only. A later turn feeds
only the tokens that its row has not seen: the last sampled one and the tool result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.engines.contract import Sample, SamplingRequest
from tasks.engines.transformers import prefixes
from tasks.engines.transformers.drawing import Drawing, Turns
from tasks.engines.transformers.rows import Copies, Rows, Wanted
from tasks.policy.routed_experts import RoutedShape
from tasks.trees.tree import common_length

FEED_TOKENS = 8192  # padded positions of one prefill pass: bounds its memory
NO_TOKENS = np.zeros(0, np.int32)
ALIGNMENT = 64  # bytes, as torch's own allocator's
SPARE_BYTES, SPARE_TENSORS = 2**28, 4  # limits of SpareMemory: bytes of one tensor, and tensors


@dataclass(frozen=True)
class Network:
    """A policy as a session uses it: its forward pass over a cache, and the shape of that cache."""

    layers: int
    key_value_heads: int
    head_size: int
    like: Tensor  # a tensor of the type, and on the device, of keys and values
    # tokens [rows, fed] and an index of each row [rows] to its hidden states [rows, hidden]
    last_states: Callable[[Tensor, Tensor, RaggedCache], Tensor]
    head: Callable[[Tensor], Tensor]  # [..., hidden] to logits [..., vocabulary]
    experts: RoutedShape | None = None  # of what routers choose for a token; None without mixtures


@dataclass
class SpareMemory:
    """Memory of ended sessions, for the next ones of an engine; on a CPU only.

    Touching fresh memory costs more than a decoding step of a small policy.
    """

    tensors: list[Tensor] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, size: int, like: Tensor) -> Tensor:
        """Return at least ``size`` numbers of the type of ``like``: an earlier session's, or zeros.

        Numbers that an earlier session has left are finite and masked, so they change no result.
        """
        with self.lock:
            for index, spare in enumerate(self.tensors):
                if (spare.dtype, spare.device) == (like.dtype, like.device) and len(spare) >= size:
                    return self.tensors.pop(index)
        with torch.inference_mode(False):  # memory that may be used in any mode
            return _zeros(size, like)

    def put(self, memory: Tensor) -> None:
        """Keep the memory of a session that has ended, if it is not too large."""
        if memory.device.type == "cpu" and memory.nbytes <= SPARE_BYTES:
            with self.lock:
                self.tensors.append(memory)
                del self.tensors[:-SPARE_TENSORS]


def _zeros(size: int, like: Tensor) -> Tensor:
    """Return zeros; on a CPU, memory that the system provides where it is touched first.

    Most rows of a cache are never touched: paths share rows.
    """
    if like.device.type != "cpu":
        return like.new_zeros(size)
    memory = torch.from_numpy(np.zeros(size * like.itemsize + ALIGNMENT, np.uint8))
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + size * like.itemsize].view(like.dtype)


class RaggedCache:
    """Keys and values, [layers, 2, rows, key-value heads, positions, head size].

    transformers takes it as ``past_key_values`` and calls ``update``.
    """

    def __init__(self, network: Network, rows: int, positions: int, spare: SpareMemory) -> None:
        heads = network.key_value_heads
        shape = (network.layers, 2, rows, heads, positions, network.head_size)
        size = math.prod(shape)
        self.memory = spare.take(size, network.like)
        self.store = self.memory[:size].view(shape)
        self.experts: Tensor | None = None  # [rows, positions, routers, chosen]
        if routed := network.experts:
            each = (rows, positions, routed.routers, routed.chosen)
            self.experts = network.like.new_zeros(each, dtype=routed.kind)
        self.rows: Tensor | slice = slice(0, 0)  # the rows that are being fed
        self.positions = torch.zeros(0, 0, dtype=torch.long)  # [rows, fed] to write at
        self.visible = 0  # positions that any row may attend to
        self.shared = 0  # first positions that hold the same in all rows that are fed

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """Write key and value [rows, heads, fed, head size]; return all visible ones."""
        new = torch.stack((key, value), 1).permute(0, 3, 1, 2, 4).flatten(0, 1)
        self.write(new, layer, *self.places())
        return self.seen(layer)

    def places(self, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the row and the position of each token that is fed, of all or of ``real`` ones."""
        rows = self.row_numbers()[:, None].expand_as(self.positions).flatten()
        positions = self.positions.flatten()
        return (rows, positions) if real is None else (rows[real], positions[real])

    def row_numbers(self) -> Tensor:
        """Return the rows that are being fed. [rows]"""
        if isinstance(self.rows, slice):
            return torch.arange(self.rows.stop, device=self.store.device)
        return self.rows

    def write(self, new: Tensor, layer: int, rows: Tensor, positions: Tensor) -> None:
        """Write keys and values [tokens, 2, heads, head size], each to its row and position."""
        self.store[layer][:, rows, :, positions] = new

    def seen(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [rows, heads, visible, head size]; of rows in front, views."""
        keys, values = self.store[layer][:, self.rows, :, : self.visible]
        return keys, values

    def note(self, chosen: Tensor) -> None:
        """Keep the experts [rows x fed, routers, chosen] of the tokens that have just been fed."""
        assert self.experts is not None, "only a network with routers notes them"
        fed = chosen.unflatten(0, self.positions.shape)
        self.experts[self.row_numbers()[:, None], self.positions] = fed

    def experts_of(self, row: int, length: int) -> NDArray[Any] | None:
        """Return the experts [length, routers, chosen] of the first tokens of a row."""
        return None if self.experts is None else self.experts[row, :length].cpu().numpy().copy()

    def copy(self, copies: Copies) -> None:
        """Copy beginnings of rows to other rows; a row may be both source and target."""
        if copies.source:
            beginnings = self.store[:, :, :, :, : copies.positions]
            both = set(copies.source) & set(copies.target)
            taken = {row: beginnings[:, :, row].clone() for row in both}
            for source, target in zip(copies.source, copies.target, strict=True):  # whole stretches
                beginnings[:, :, target].copy_(taken.get(source, beginnings[:, :, source]))
            if self.experts is not None:
                chosen = self.experts[copies.source, : copies.positions]
                self.experts[copies.target, : copies.positions] = chosen

    def get_seq_length(self, *_: object) -> int:
        """Return the visible positions; transformers calls it."""
        return self.visible


class RaggedSession:
    """The rows of one batch of dialogues. See ``tasks.engines.Session``."""

    def __init__(self, network: Network, spare: SpareMemory, drawing: Drawing, paths: int) -> None:
        """Make room for ``paths`` paths; ``spare`` may have the memory."""
        self.network, self.spare, self.drawing = network, spare, drawing
        self.device = network.like.device
        with torch.inference_mode():  # a mode of the thread: each call of a session enters it
            self.cache = RaggedCache(network, paths, drawing.context, spare)
        self.rows = Rows(paths)
        self.cached: dict[int, NDArray[np.int32]] = {}  # path -> its tokens in the cache

    def open(self) -> int:
        handle = self.rows.open()
        self.cached[handle] = NO_TOKENS
        return handle

    def fork(self, handle: int) -> int:
        child = self.rows.fork(handle)
        self.cached[child] = self.cached[handle]
        return child

    def close(self, handle: int) -> None:
        self.rows.close(handle)
        del self.cached[handle]

    def end_session(self) -> None:
        """Hand the cache's memory to later sessions; the session cannot be used any more."""
        self.spare.put(self.cache.memory)

    @torch.inference_mode()
    def sample(self, requests: Sequence[SamplingRequest]) -> list[Sample]:
        if not requests:
            return []
        self.drawing.check(requests)
        row_of, logits = self._feed_all(requests)
        return self._decode(requests, row_of, logits)

    def _feed_all(self, requests: Sequence[SamplingRequest]) -> tuple[NDArray[np.int64], Tensor]:
        """Feed what is not cached; requests with equal tokens share a row from here on.

        Returns the row of each request, and the last tokens' logits [rows, vocabulary].
        """
        alike: dict[bytes, list[int]] = {}
        for index, request in enumerate(requests):
            alike.setdefault(request.tokens.tobytes(), []).append(index)
        groups = list(alike.values())
        row_requests = [self._wanted([requests[index] for index in group]) for group in groups]
        rows, copies = self.rows.arrange(row_requests)
        self.cache.copy(copies)
        row_of = np.zeros(len(requests), np.int64)
        tokens, known = [NO_TOKENS] * len(rows), [0] * len(rows)
        for group, row, one in zip(groups, rows, row_requests, strict=True):
            row_of[group] = row
            tokens[row], known[row] = requests[group[0]].tokens, one.known
        return row_of, self._feed_rows(tokens, known)

    def _wanted(self, alike: Sequence[SamplingRequest]) -> Wanted:
        """Return the longest cached beginning of requests with equal tokens."""
        tokens = alike[0].tokens[:-1]  # the last one is fed again, for its logits
        known = [common_length(self.cached[request.handle], tokens) for request in alike]
        best = int(np.argmax(known))
        source = self.rows.row[alike[best].handle] if known[best] else None
        return Wanted([request.handle for request in alike], source, known[best])

    def _feed_rows(self, tokens: list[NDArray[np.int32]], known: list[int]) -> Tensor:
        """Feed to each row what follows its first ``known`` tokens. [rows, vocabulary]"""
        known = self._feed_shared(tokens, known)
        pending = [len(all_of) - cached for all_of, cached in zip(tokens, known, strict=True)]
        common = min(prefixes.common_to(tokens), min(map(len, tokens)) - 1)
        self.cache.shared = common if common <= min(known) else 0
        if len(tokens) * max(pending) <= FEED_TOKENS:
            logits = self._feed(slice(0, len(tokens)), tokens, known)  # a view: nothing is copied
            self.cache.shared = common
            return logits
        width = self.drawing.ids.end
        logits = torch.empty(len(tokens), width, device=self.device, dtype=torch.float32)
        for batch in _chunks(pending):
            some = [tokens[row] for row in batch], [known[row] for row in batch]
            logits[batch] = self._feed(batch, *some)
        self.cache.shared = common
        return logits

    def _feed_shared(self, tokens: list[NDArray[np.int32]], known: list[int]) -> list[int]:
        """Feed once what several rows begin with; return how much of each is known then."""
        levels, after = prefixes.plan(tokens, known)
        before = list(known)
        for level in levels:
            self.cache.shared = 0
            fed = [shared for shared in level if before[shared.leader] < shared.end]
            for batch in _chunks([shared.end - before[shared.leader] for shared in fed]):
                some = [fed[index] for index in batch]
                self._feed(
                    [shared.leader for shared in some],
                    [tokens[shared.leader][: shared.end] for shared in some],
                    [before[shared.leader] for shared in some],
                )
            for shared in level:
                sources = [shared.leader] * len(shared.followers)
                self.cache.copy(Copies(sources, shared.followers, shared.end))
                for row in (shared.leader, *shared.followers):
                    before[row] = max(before[row], shared.end)
        return after

    def _feed(
        self, rows: list[int] | slice, tokens: Sequence[NDArray[np.int32]], known: Sequence[int]
    ) -> Tensor:
        """Run one prefill pass over ``rows``: of each, the tokens after the first ``known``.

        Returns the logits [rows, vocabulary] of the last tokens.
        """
        starts = torch.tensor(known, device=self.device)
        ends = torch.tensor([len(all_of) for all_of in tokens], device=self.device)
        lengths = ends - starts
        fed = int(lengths.max())
        padded = torch.zeros(len(tokens), fed, dtype=torch.long)
        for i, (all_of, cached) in enumerate(zip(tokens, known, strict=True)):
            padded[i, : len(all_of) - cached] = torch.from_numpy(all_of[cached:].astype(np.int64))
        positions = starts[:, None] + torch.arange(fed, device=self.device)
        # a padded position lies behind its row's end: never attended to, and overwritten later
        self.cache.rows = (
            rows if isinstance(rows, slice) else torch.tensor(rows, device=self.device)
        )
        self.cache.positions = positions.clamp(max=self.drawing.context - 1)
        return self.logits(padded.to(self.device), lengths - 1, int(ends.max()))

    def logits(self, tokens: Tensor, last: Tensor, visible: int) -> Tensor:
        """Compute ``tokens`` [rows, fed] at ``self.cache.positions``.

        Returns the logits [rows, vocabulary] of the tokens at the indices ``last`` [rows].
        """
        self.cache.visible = visible
        return self.network.head(self.network.last_states(tokens, last, self.cache)).float()

    def _decode(
        self, requests: Sequence[SamplingRequest], row_of: NDArray[np.int64], logits: Tensor
    ) -> list[Sample]:
        """Sample until every request has stopped, from ``logits`` [rows, vocabulary] on.

        ``row_of`` [requests] changes while paths that share a row part.
        """
        turns = Turns(self.drawing, requests, self.device)
        starts = np.array([len(request.tokens) for request in requests])
        live = np.argsort(row_of, kind="stable")  # requests that sample, by their rows
        experts: dict[int, NDArray[Any] | None] = {}  # of the requests that have stopped
        while True:
            step = turns.step
            done = turns.draw(live, logits, row_of[live])
            for request in live[done]:
                self._remember(requests[request], turns.tokens[request, :step])
                length = int(starts[request]) + step
                experts[request] = self.cache.experts_of(int(row_of[request]), length)
            live = np.delete(live, done)
            if not len(live):
                samples = enumerate(turns.samples())
                return [replace(sample, experts=experts[i]) for i, sample in samples]
            drawn = turns.tokens[:, step]
            live = self._part(requests, live, row_of, drawn, starts + step)
            first = np.flatnonzero(np.diff(row_of[live], prepend=-1))  # one request of each row
            new = torch.from_numpy(drawn[live[first]].astype(np.int64)).to(self.device)
            positions = starts[live[first]] + step
            self.cache.rows = slice(0, len(first))
            self.cache.positions = torch.from_numpy(positions[:, None]).to(self.device)
            only = torch.zeros_like(new)
            logits = self.logits(new[:, None], only, int(positions.max()) + 1)

    def _part(
        self,
        requests: Sequence[SamplingRequest],
        live: NDArray[np.int64],
        row_of: NDArray[np.int64],
        drawn: NDArray[np.int32],
        known: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Give each different token that follows a row a row of its own, in front.

        ``drawn`` [requests] are the new tokens, ``known`` [requests] the tokens before them. Writes
        the new rows into ``row_of``; returns the live requests in the order of their rows.
        """
        key = row_of[live] * len(self.drawing.pieces) + drawn[live]
        branches, of = np.unique(key, return_inverse=True)
        sources = branches // len(self.drawing.pieces)
        if (sources == np.arange(len(sources))).all():  # no row before the last has ended or parted
            return live
        groups = [live[of == branch] for branch in range(len(branches))]
        row_requests = [
            Wanted([requests[i].handle for i in group], int(source), int(known[group[0]]))
            for group, source in zip(groups, sources, strict=True)
        ]
        rows, copies = self.rows.arrange(row_requests)
        self.cache.copy(copies)
        for group, row in zip(groups, rows, strict=True):
            row_of[group] = row
        return live[np.argsort(row_of[live], kind="stable")]

    def _remember(self, request: SamplingRequest, fed: NDArray[np.int32]) -> None:
        """Note what is cached of a path that has stopped: all but its last token, never fed."""
        self.cached[request.handle] = np.concatenate([request.tokens, fed])
        self.rows.length[request.handle] = len(self.cached[request.handle])


def _chunks(lengths: list[int]) -> Iterator[list[int]]:
    """Yield batches of indices, short rows first, in which rows x longest is within FEED_TOKENS."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        if batch and (len(batch) + 1) * lengths[row] > FEED_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch

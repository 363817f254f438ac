"""The decoding loop of the transformers engine, over a cache whose rows differ in length.

One row of the cache belongs to one path, from its prompt to its last turn. Rows are not padded;
the rows that still sample are kept in front, so that a step computes live rows only. A branch
copies its parent's row, equal prompts are computed once, and a later turn feeds only the tokens
that its row has not seen: the last sampled one and the tool result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.engines.contract import Request, Sample
from tasks.trees.outcomes import StopReason

FEED_TOKENS = 8192  # padded positions of one prefill pass: bounds its memory
NO_TOKENS = np.zeros(0, np.int32)
SPARE_BYTES, SPARE_TENSORS = 2**28, 4  # limits of SpareMemory: bytes of one tensor, and tensors


@dataclass(frozen=True)
class Network:
    """A policy as a session uses it: its forward pass over a cache, and the shape of that cache."""

    layers: int
    key_value_heads: int
    head_size: int
    like: Tensor  # a tensor of the type, and on the device, of keys and values
    # tokens [rows, fed] to hidden states [rows, fed, hidden]
    hidden_states: Callable[[Tensor, RaggedCache], Tensor]
    head: Callable[[Tensor], Tensor]  # [..., hidden] to logits [..., vocabulary]


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
            for place, spare in enumerate(self.tensors):
                if (spare.dtype, spare.device) == (like.dtype, like.device) and len(spare) >= size:
                    return self.tensors.pop(place)
        with torch.inference_mode(False):  # memory that may be used in any mode
            return like.new_zeros(size)

    def put(self, memory: Tensor) -> None:
        """Keep the memory of a session that has ended, if it is not too large."""
        if memory.device.type == "cpu" and memory.nbytes <= SPARE_BYTES:
            with self.lock:
                self.tensors.append(memory)
                del self.tensors[:-SPARE_TENSORS]


class RaggedCache:
    """Keys and values, [layers, rows, 2 x key-value heads, positions, head size].

    transformers takes it as ``past_key_values`` and calls ``update``.
    """

    def __init__(self, network: Network, rows: int, positions: int, spare: SpareMemory) -> None:
        heads = 2 * network.key_value_heads  # heads of the keys first
        shape = (network.layers, rows, heads, positions, network.head_size)
        size = math.prod(shape)
        self.memory = spare.take(size, network.like)
        self.store = self.memory[:size].view(shape)
        self.rows: Tensor | slice = slice(0, 0)  # the rows that are being fed
        self.positions = torch.zeros(0, 0, dtype=torch.long)  # [rows, fed] to write at
        self.visible = 0  # positions that any row may attend to

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """Write key and value [rows, heads, fed, head size]; return all visible ones."""
        return self.write(torch.cat((key, value), 1), layer)

    def write(self, new: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Do the same with key and value in one tensor [rows, 2 x heads, fed, head size]."""
        where = self.positions[:, None, :, None].expand_as(new)
        seen = self.store[layer, self.rows]  # rows in front are a view, others a copy
        seen.scatter_(2, where, new)
        if not isinstance(self.rows, slice):
            self.store[layer, self.rows] = seen
        keys, values = seen[:, :, : self.visible].chunk(2, 1)
        return keys, values

    def copy(self, source: Sequence[int], target: Sequence[int], positions: int) -> None:
        """Copy the first ``positions`` of the rows ``source`` to the rows ``target``."""
        self.store[:, target, :, :positions] = self.store[:, source, :, :positions]

    def get_seq_length(self, *_: object) -> int:
        """Return the visible positions; transformers calls it."""
        return self.visible


class RaggedSession:
    """The rows of one batch of dialogues. See ``tasks.engines.Session``."""

    def __init__(
        self,
        network: Network,
        spare: SpareMemory,
        pieces: Sequence[str],
        end: int,
        paths: int,
        context: int,
        temperature: float,
        top_p: float,
        stop: Sequence[str],
    ) -> None:
        """``pieces`` are the texts of the vocabulary's tokens, ``end`` is the end token."""
        self.network, self.spare, self.pieces, self.end = network, spare, pieces, end
        self.temperature, self.top_p, self.stop = temperature, top_p, stop
        self.device = network.like.device
        with torch.inference_mode():  # a mode of the thread: each call of a session enters it
            self.cache = RaggedCache(network, paths, context, spare)
        self.context = context
        self.seen: list[NDArray[np.int32]] = [NO_TOKENS] * paths  # by row: tokens cached
        self.row: dict[int, int] = {}  # handle -> row
        self.free = list(range(paths))[::-1]
        self.handles = 0
        last = {text[-1] for text in stop}
        self.may_stop = np.array([bool(last & set(piece)) for piece in self.pieces])

    def open(self) -> int:
        if not self.free:
            raise RuntimeError(f"all {len(self.seen)} paths of this session are in use")
        self.handles += 1
        self.row[self.handles] = self.free.pop()
        self.seen[self.row[self.handles]] = NO_TOKENS
        return self.handles

    @torch.inference_mode()
    def fork(self, handle: int) -> int:
        child = self.open()
        source, target = self.row[handle], self.row[child]
        self.cache.copy([source], [target], len(self.seen[source]))
        self.seen[target] = self.seen[source]
        return child

    def close(self, handle: int) -> None:
        self.free.append(self.row.pop(handle))

    def end_session(self) -> None:
        """Hand the cache's memory to later sessions; the session cannot be used any more."""
        self.spare.put(self.cache.memory)

    @torch.inference_mode()
    def sample(self, requests: Sequence[Request]) -> list[Sample]:
        if not requests:
            return []
        longest = max(len(request.tokens) + request.max_tokens for request in requests)
        if longest > self.context:
            raise ValueError(f"a turn may reach {longest} tokens, the session has {self.context}")
        self._to_front([request.handle for request in requests])
        order = sorted(range(len(requests)), key=lambda i: self.row[requests[i].handle])
        in_rows = [requests[i] for i in order]  # request i now belongs to row i
        samples = self._decode(in_rows, self._feed_all(in_rows))
        return [samples[place] for place in np.argsort(order)]

    def _to_front(self, handles: Sequence[int]) -> None:
        """Move the rows of ``handles`` to the front, in any order; swap as few as possible."""
        count = len(handles)
        rows = {self.row[handle] for handle in handles}
        behind = sorted(row for row in rows if row >= count)
        holes = [row for row in range(count) if row not in rows]
        if behind:
            longest = max(len(self.seen[row]) for row in (*behind, *holes))
            self._rearrange(behind + holes, holes + behind, longest)

    def _rearrange(self, source: list[int], target: list[int], positions: int) -> None:
        """Make row ``target[i]`` what row ``source[i]`` was; both lists hold the same rows."""
        free = set(self.free)
        used = [place for place, row in enumerate(source) if row not in free]
        self.cache.copy([source[i] for i in used], [target[i] for i in used], positions)
        seen = [self.seen[row] for row in source]
        for row, tokens in zip(target, seen, strict=True):
            self.seen[row] = tokens
        moved = dict(zip(source, target, strict=True))
        self.row = {handle: moved.get(row, row) for handle, row in self.row.items()}
        self.free = [moved.get(row, row) for row in self.free]

    def _feed_all(self, requests: Sequence[Request]) -> Tensor:
        """Feed what each row has not seen; return the last tokens' logits [requests, vocabulary].

        A prompt that several new rows share is computed once and copied.
        """
        leaders: dict[bytes, int] = {}
        leader_of = list(range(len(requests)))
        pending = []
        for row, request in enumerate(requests):
            known = _common_prefix(self.seen[row], request.tokens[:-1])
            if known == 0:
                leader_of[row] = leaders.setdefault(request.tokens.tobytes(), row)
            pending.append(request.tokens[known:])
            self.seen[row] = request.tokens
        own = [row for row, leader in enumerate(leader_of) if leader == row]
        if len(own) == len(requests) and len(own) * max(map(len, pending)) <= FEED_TOKENS:
            return self._feed(slice(0, len(own)), pending)  # all in front: nothing is copied
        rows = sorted(own, key=lambda row: len(pending[row]))
        logits = torch.empty(
            len(requests), len(self.pieces), device=self.device, dtype=torch.float32
        )
        for batch in _chunks(rows, [len(pending[row]) for row in rows]):
            logits[batch] = self._feed(batch, [pending[row] for row in batch])
        followers = [row for row, leader in enumerate(leader_of) if leader != row]
        if followers:
            sources = [leader_of[row] for row in followers]
            self.cache.copy(sources, followers, max(len(self.seen[row]) for row in followers))
            logits[followers] = logits[sources]
        return logits

    def _feed(self, rows: list[int] | slice, pending: list[NDArray[np.int32]]) -> Tensor:
        """Run one prefill pass: feed ``pending[i]`` as the last tokens of the i-th of ``rows``.

        Returns the logits [rows, vocabulary] of the last tokens.
        """
        fed = max(len(tokens) for tokens in pending)
        lengths = torch.tensor([len(tokens) for tokens in pending], device=self.device)
        places = range(len(pending)) if isinstance(rows, slice) else rows
        ends = torch.tensor([len(self.seen[row]) for row in places], device=self.device)
        tokens = torch.zeros(len(pending), fed, dtype=torch.long)
        for i, new in enumerate(pending):
            tokens[i, : len(new)] = torch.from_numpy(new.astype(np.int64))
        positions = (ends - lengths)[:, None] + torch.arange(fed, device=self.device)
        # a padded position lies behind its row's end: never attended to, and overwritten later
        self.cache.rows = (
            rows if isinstance(rows, slice) else torch.tensor(rows, device=self.device)
        )
        self.cache.positions = positions.clamp(max=self.context - 1)
        hidden = self.forward(tokens.to(self.device), int(ends.max()))
        last = hidden[torch.arange(len(pending), device=self.device), lengths - 1]
        return self.network.head(last).float()

    def forward(self, tokens: Tensor, visible: int) -> Tensor:
        """Return hidden states [rows, fed, hidden] of ``tokens`` at ``self.cache.positions``."""
        self.cache.visible = visible
        return self.network.hidden_states(tokens, self.cache)

    def _decode(self, requests: Sequence[Request], logits: Tensor) -> list[Sample]:
        """Sample until every row has stopped, from ``logits`` [requests, vocabulary] on.

        A row that stops is swapped with the last live one.
        """
        count, steps = len(requests), max(request.max_tokens for request in requests)
        noise = torch.from_numpy(_noise(requests, steps)).to(self.device)  # [requests, steps]
        tokens = np.zeros((count, steps), np.int32)
        scores = torch.zeros(2, steps, count, device=self.device)  # logprobs, entropies
        length, stopped = np.zeros(count, np.int64), [""] * count
        live = np.arange(count)  # live[i]: the request that row i serves
        ends = torch.tensor([len(request.tokens) for request in requests], device=self.device)
        self.cache.visible = int(ends.max())  # a row that ends at once is moved whole
        for step in range(steps):
            at = torch.from_numpy(live).to(self.device)
            drawn, logprob, entropy = draw(logits, noise[at, step], self.temperature, self.top_p)
            scores[0, step, at], scores[1, step, at] = logprob, entropy
            tokens[live, step] = drawn.cpu().numpy()
            length[live] += 1
            done = self._stops(requests, tokens, live, step, stopped)
            if done:
                live = self._compact(live, done)
                if not len(live):
                    break
                at = torch.from_numpy(live).to(self.device)
            new = torch.from_numpy(tokens[live, step].astype(np.int64)).to(self.device)
            self.cache.rows = slice(0, len(live))
            self.cache.positions = (ends[at] + step)[:, None]
            hidden = self.forward(new[:, None], int(ends[at].max()) + step + 1)
            logits = self.network.head(hidden[:, -1]).float()
        self._remember(requests, tokens, length)
        logprobs, entropies = scores.cpu().numpy()
        return [
            Sample(
                tokens[i, :n].copy(), logprobs[:n, i].copy(), entropies[:n, i].copy(), stopped[i]
            )
            for i, n in enumerate(length)
        ]

    def _stops(
        self,
        requests: Sequence[Request],
        tokens: NDArray[np.int32],
        live: NDArray[np.int64],
        step: int,
        stopped: list[str],
    ) -> list[int]:
        """Return the rows that end at this step; write why into ``stopped`` of their requests."""
        drawn = tokens[live, step]
        limits = np.array([requests[i].max_tokens for i in live])
        suspects = np.flatnonzero(self.may_stop[drawn] | (drawn == self.end) | (step + 1 >= limits))
        for row in suspects:
            request = live[row]
            # a character is at most 4 tokens, its bytes: so many tokens hold any stop string
            window = 4 * max(map(len, self.stop), default=0)
            text = "".join(
                self.pieces[t] for t in tokens[request, max(0, step - window) : step + 1]
            )
            if drawn[row] == self.end:
                stopped[request] = StopReason.END
            elif any(stop in text for stop in self.stop):
                stopped[request] = StopReason.STOP
            elif step + 1 >= limits[row]:
                stopped[request] = StopReason.LENGTH
        return [int(row) for row in suspects if stopped[live[row]]]

    def _compact(self, live: NDArray[np.int64], done: list[int]) -> NDArray[np.int64]:
        """Swap the rows in ``done`` behind the live ones; return the new ``live``."""
        order = list(range(len(live)))
        left = len(live)
        for row in sorted(done, reverse=True):
            left -= 1
            order[row], order[left] = order[left], order[row]
        changed = [row for row in range(len(live)) if order[row] != row]
        if changed:
            self._rearrange([order[row] for row in changed], changed, self.cache.visible)
        return live[order][:left]

    def _remember(
        self, requests: Sequence[Request], tokens: NDArray[np.int32], length: NDArray[np.int64]
    ) -> None:
        """Note what each row has seen: all of its turn but the last token, which was never fed."""
        for i, request in enumerate(requests):
            turn = tokens[i, : max(0, length[i] - 1)]
            self.seen[self.row[request.handle]] = np.concatenate([request.tokens, turn])


def draw(
    logits: Tensor, noise: Tensor, temperature: float, top_p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution.

    logits [rows, vocabulary], noise [rows] uniform in [0, 1). Returns tokens, log-probabilities
    (nats, at the temperature, before top-p) and entropies of that distribution, divided by ln|V|;
    all [rows].
    """
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    probabilities = logprobs.exp()
    entropies = -(probabilities * logprobs).sum(-1) / math.log(logits.shape[-1])
    kept = probabilities if top_p >= 1 else nucleus(probabilities, top_p)
    cumulative = kept.cumsum(-1)
    target = noise.to(kept.dtype)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    if bool((tokens == kept.shape[-1]).any()):
        # rounding has put a target at the very end: take the last token that has any probability
        last = kept.shape[-1] - 1 - (kept > 0).flip(-1).to(torch.uint8).argmax(-1)
        tokens = torch.minimum(tokens, last)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0], entropies.clamp(0, 1)


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Set to 0 all but the smallest set of tokens of mass ``top_p`` (arXiv 1904.09751)."""
    ordered, index = probabilities.sort(dim=-1, descending=True, stable=True)
    outside = ordered.cumsum(-1) - ordered >= top_p
    return probabilities.masked_fill(outside.gather(-1, index.argsort(-1)), 0.0)


def _noise(requests: Sequence[Request], steps: int) -> NDArray[np.float32]:
    """Return uniform numbers [requests, steps], each row from a stream of its request's seed."""
    rows = [
        np.random.Generator(np.random.Philox(key=request.seed)).random(steps, np.float32)
        for request in requests
    ]
    return np.stack(rows)


def _common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Return how many tokens from the start on are the same."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


def _chunks(rows: list[int], lengths: list[int]) -> Iterator[list[int]]:
    """Yield batches of rows (sorted by length) in which rows x longest is within FEED_TOKENS."""
    batch: list[int] = []
    for row, length in zip(rows, lengths, strict=True):
        if batch and (len(batch) + 1) * length > FEED_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch

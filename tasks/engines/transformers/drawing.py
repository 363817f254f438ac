"""How the turns of a session are drawn and ended, whatever computes their logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.engines.contract import Sample, SamplingRequest
from tasks.policy.token_ids import TokenIds
from tasks.trees.outcomes import StopReason

PLAIN = 4096  # tokens of a vocabulary up to which a cumulative sum over all is fast
BLOCK, SMALL_BLOCK = 256, 32  # tokens that a larger one is divided into; the one divides the other
LARGEST = 64  # tokens among which a nucleus is looked for first


@dataclass(frozen=True)
class Drawing:
    """What decides the turns of a session beside their logits and seeds."""

    pieces: Sequence[str]  # texts of the vocabulary's tokens
    ids: TokenIds  # those that have a token: no other one is drawn
    end: int  # the end token
    context: int  # tokens of a path, at most
    temperature: float
    top_p: float
    stop: Sequence[str]

    @cached_property
    def may_stop(self) -> NDArray[np.bool_]:
        """[vocabulary] whether a token has the last character of a stop string."""
        last = {text[-1] for text in self.stop}
        return np.array([bool(last & set(piece)) for piece in self.pieces])

    def check(self, requests: Sequence[SamplingRequest]) -> None:
        """Raise ValueError for a turn that may exceed the session's context."""
        longest = max(len(request.tokens) + request.max_tokens for request in requests)
        if longest > self.context:
            raise ValueError(f"a turn may reach {longest} tokens, the session has {self.context}")


class Turns:
    """The turns of some requests while they are sampled, a token of each at a time."""

    def __init__(
        self, drawing: Drawing, requests: Sequence[SamplingRequest], device: torch.device
    ) -> None:
        count, steps = len(requests), max(request.max_tokens for request in requests)
        self.drawing = drawing
        self.limits = np.array([request.max_tokens for request in requests])
        self.noise = torch.from_numpy(noise_of(requests, steps)).to(device)  # [requests, steps]
        self.tokens = np.zeros((count, steps), np.int32)
        self.scores = torch.zeros(2, steps, count, device=device)  # logprobs, entropies
        self.length, self.stopped = np.zeros(count, np.int64), [""] * count
        self.step = 0  # tokens that are drawn of each turn that has not ended

    def draw(self, live: NDArray[np.int64], logits: Tensor, rows: NDArray[np.int64]) -> list[int]:
        """Draw a token of each turn in ``live`` [D]; return the places there of those that end.

        logits [R, rows of the head]; rows [D], ascending: where each is drawn from.
        """
        of, step, device = torch.from_numpy(live).to(logits.device), self.step, logits.device
        where = torch.from_numpy(rows).to(device)
        drawing = self.drawing
        drawn, logprob, entropy = draw(
            drawing.ids.only(logits),
            self.noise[of, step],
            drawing.temperature,
            drawing.top_p,
            where,
            drawing.ids.count,
        )
        self.scores[0, step, of], self.scores[1, step, of] = logprob, entropy
        self.tokens[live, step] = drawn.cpu().numpy()
        self.length[live] += 1
        self.step += 1
        return self._ended(live, step)

    def samples(self) -> list[Sample]:
        """Return the turns, in the order of their requests."""
        logprobs, entropies = self.scores.cpu().numpy()
        return [
            Sample(
                self.tokens[i, :n].copy(),
                logprobs[:n, i].copy(),
                entropies[:n, i].copy(),
                self.stopped[i],
            )
            for i, n in enumerate(self.length)
        ]

    def _ended(self, live: NDArray[np.int64], step: int) -> list[int]:
        """Return the places in ``live`` that end at this step; note why."""
        drawing, drawn = self.drawing, self.tokens[live, step]
        full = step + 1 >= self.limits[live]
        suspects = np.flatnonzero(drawing.may_stop[drawn] | (drawn == drawing.end) | full)
        for place in suspects:
            turn = live[place]
            # a character is at most 4 tokens, its bytes: so many tokens hold any stop string
            window = 4 * max(map(len, drawing.stop), default=0)
            text = "".join(
                drawing.pieces[t] for t in self.tokens[turn, max(0, step - window) : step + 1]
            )
            if drawn[place] == drawing.end:
                self.stopped[turn] = StopReason.END
            elif any(stop in text for stop in drawing.stop):
                self.stopped[turn] = StopReason.STOP
            elif full[place]:
                self.stopped[turn] = StopReason.LENGTH
        return [int(place) for place in suspects if self.stopped[live[place]]]


def draw(
    logits: Tensor,
    noise: Tensor,
    temperature: float,
    top_p: float,
    rows: Tensor,
    vocabulary: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens by inverting the cumulative distributions of their rows.

    logits [R, vocabulary]; noise [D] uniform in [0, 1), one a draw; rows [D], ascending: where each
    is drawn from. Returns tokens, log-probabilities (nats, at the temperature, before top-p) and
    entropies of that distribution, divided by ln|V|; all [D]. ``vocabulary`` is |V|, where some
    logits are of no token.
    """
    shifted = logits - logits.amax(-1, keepdim=True)
    if temperature != 1:
        shifted /= temperature
    weights = _padded_exp(shifted)
    total = weights.sum(-1)
    normalizer = total.log()  # of ``shifted``
    mixed = torch.linalg.vecdot(weights[:, : shifted.shape[-1]], shifted)
    entropies = (normalizer - mixed / total) / math.log(vocabulary or logits.shape[-1])
    masses = weights if top_p >= 1 else nucleus(weights, top_p * total[:, None])
    columns = _places_in_rows(rows)
    fractions = noise.new_zeros(len(logits), int(columns.max()) + 1)  # [R, most draws of a row]
    fractions[rows, columns] = noise
    tokens = inverted(masses, fractions)[rows, columns]
    return tokens, shifted[rows, tokens] - normalizer[rows], entropies.clamp(0, 1)[rows]


def _padded_exp(shifted: Tensor) -> Tensor:
    """Return exponentials [R, vocabulary], with zeros behind to fill the last block of a large one.

    One pass over the vocabulary is all that drawing needs of them.
    """
    vocabulary = shifted.shape[-1]
    width = vocabulary if vocabulary <= PLAIN else -(-vocabulary // BLOCK) * BLOCK
    if width == vocabulary:
        return shifted.exp()
    weights = shifted.new_empty(len(shifted), width)
    weights[:, vocabulary:] = 0
    torch.exp(shifted, out=weights[:, :vocabulary])
    return weights


def inverted(masses: Tensor, fractions: Tensor) -> Tensor:
    """Return where the cumulative masses [R, V] exceed fractions [R, M] of their sums. [R, M]

    No token without mass is returned. Of a large vocabulary (a multiple of BLOCK), the block is
    found first, by the sums of all blocks, and then the token in it: the same token, but for
    rounding, without a cumulative sum over all.
    """
    if masses.shape[-1] <= PLAIN:
        cumulative = masses.cumsum(-1)
        return _first_above(cumulative, fractions * cumulative[:, -1:], masses)
    blocks = masses.unflatten(-1, (-1, BLOCK))
    sums = blocks.sum(-1).double()
    ends = sums.cumsum(-1)
    targets = fractions * ends[:, -1:]
    block = _first_above(ends, targets, sums)
    beyond = targets - (ends - sums).gather(-1, block)
    members = blocks[torch.arange(len(blocks), device=block.device)[:, None], block].double()
    place = _first_above(members.cumsum(-1), beyond[..., None], members)[..., 0]
    return block * BLOCK + place


def _first_above(cumulative: Tensor, targets: Tensor, masses: Tensor) -> Tensor:
    """Return the first places [..., M] whose cumulative masses [..., V] are above targets.

    Where rounding has put a target at the very end, return the last place that has any mass.
    """
    found = torch.searchsorted(cumulative, targets, right=True)
    if bool((found == masses.shape[-1]).any()):
        last = masses.shape[-1] - 1 - (masses > 0).flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
        found = torch.minimum(found, last)
    return found


def _places_in_rows(rows: Tensor) -> Tensor:
    """Return 0, 1, ... for the draws of each row; ``rows`` [D] are ascending. [D]"""
    return torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows)


def nucleus(masses: Tensor, top_p: float | Tensor) -> Tensor:
    """Set to 0 all but the smallest set of tokens of mass ``top_p`` (arXiv 1904.09751).

    masses [R, vocabulary]; ``top_p`` may be [R, 1]. Of equal tokens, those with small ids stay.
    Only the largest masses are sorted: so many that they reach beyond the nucleus.
    """
    kept = torch.zeros_like(masses)
    limits = masses.new_empty(len(masses), 1).copy_(torch.as_tensor(top_p))
    rows, count = torch.arange(len(masses), device=masses.device), LARGEST
    while len(rows):
        some = masses if len(rows) == len(masses) else masses[rows]
        count = min(count, masses.shape[-1])
        values, index = _largest(some, count)
        inside = values.cumsum(-1) - values < limits[rows]
        found = ~inside[:, -1] | (count == masses.shape[-1])
        kept[rows[found, None], index[found]] = values.where(inside, 0.0)[found]
        least = values.where(inside, torch.inf).amin(-1, keepdim=True)
        equal = values == least
        tied = found & (equal & ~inside).any(-1)  # else all that equal it are inside
        if bool(tied.any()):
            wanted = (equal & inside).sum(-1, keepdim=True)
            kept[rows[tied]] = _first_of_equals(some[tied], least[tied], wanted[tied])
        rows, count = rows[~found], 16 * count
    return kept


def _largest(masses: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest masses [R, count], descending, and their tokens.

    Of a large vocabulary only those blocks are looked at that have the largest maxima: as many as
    masses are wanted hold them all.
    """
    vocabulary = masses.shape[-1]
    if vocabulary <= PLAIN or vocabulary <= 4 * count * SMALL_BLOCK:
        return masses.topk(count)
    blocks = masses.unflatten(-1, (-1, SMALL_BLOCK))
    best = blocks.amax(-1).topk(count).indices  # [R, count]
    rows = torch.arange(len(masses), device=masses.device)[:, None]
    values, places = blocks[rows, best].flatten(1).topk(count)
    return values, best.gather(-1, places // SMALL_BLOCK) * SMALL_BLOCK + places % SMALL_BLOCK


def _first_of_equals(masses: Tensor, least: Tensor, wanted: Tensor) -> Tensor:
    """Keep what is above ``least`` [R, 1], and the first ``wanted`` [R, 1] of what equals it."""
    equal = masses == least
    keeps = (masses > least) | (equal & (equal.cumsum(-1) <= wanted))
    return masses.masked_fill(~keeps, 0.0)


def noise_of(requests: Sequence[SamplingRequest], steps: int) -> NDArray[np.float32]:
    """Return uniform numbers [requests, steps], each row from a stream of its request's seed."""
    rows = [
        np.random.Generator(np.random.Philox(key=request.seed)).random(steps, np.float32)
        for request in requests
    ]
    return np.stack(rows)

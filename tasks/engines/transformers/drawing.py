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
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    probabilities = logprobs.exp()
    entropies = -(probabilities * logprobs).sum(-1) / math.log(vocabulary or logits.shape[-1])
    masses = probabilities if top_p >= 1 else nucleus(probabilities, top_p)
    cumulative = masses.cumsum(-1)
    columns = _places_in_rows(rows)
    targets = noise.new_zeros(len(logits), int(columns.max()) + 1)  # [R, most draws of a row]
    targets[rows, columns] = noise
    tokens = torch.searchsorted(cumulative, targets * cumulative[:, -1:], right=True)[rows, columns]
    if bool((tokens == masses.shape[-1]).any()):
        # rounding has put a target at the very end: take the last token that has any probability
        last = masses.shape[-1] - 1 - (masses > 0).flip(-1).to(torch.uint8).argmax(-1)
        tokens = torch.minimum(tokens, last[rows])
    return tokens, logprobs[rows, tokens], entropies.clamp(0, 1)[rows]


def _places_in_rows(rows: Tensor) -> Tensor:
    """Return 0, 1, ... for the draws of each row; ``rows`` [D] are ascending. [D]"""
    return torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows)


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Set to 0 all but the smallest set of tokens of mass ``top_p`` (arXiv 1904.09751)."""
    ordered, index = probabilities.sort(dim=-1, descending=True, stable=True)
    outside = ordered.cumsum(-1) - ordered >= top_p
    return probabilities.masked_fill(outside.gather(-1, index.argsort(-1)), 0.0)


def noise_of(requests: Sequence[SamplingRequest], steps: int) -> NDArray[np.float32]:
    """Return uniform numbers [requests, steps], each row from a stream of its request's seed."""
    rows = [
        np.random.Generator(np.random.Philox(key=request.seed)).random(steps, np.float32)
        for request in requests
    ]
    return np.stack(rows)

"""Which rows of a policy's embedding have a token, so that only those are drawn and learned.

Many checkpoints have more rows than their tokenizer has tokens (Qwen2.5: 151,936 and 151,665), as
round sizes compute faster. A row without a token would take part in the softmax, in entropies and
in their ln of the vocabulary, and could be drawn: an id that no text has. So sampler, learner and
reference leave its logit out, and it never gets a gradient from them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NEVER = -1e30  # the logit of a hole: of probability 0, and finite, so that no gradient becomes NaN


@dataclass(frozen=True)
class TokenIds:
    """The ids that have a token: all below ``end`` but ``holes``, which are ascending."""

    end: int
    holes: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Return how many ids have a token: the vocabulary over which entropies are measured."""
        return self.end - len(self.holes)

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and 0 <= number < self.end and number not in self.holes

    def only(self, logits: Tensor) -> Tensor:
        """Return logits [..., rows] of the ids below ``end``; those of holes are ``NEVER``."""
        if logits.shape[-1] > self.end:
            logits = logits[..., : self.end]
        if not self.holes:
            return logits
        return logits.index_fill(-1, torch.tensor(self.holes, device=logits.device), NEVER)

    def told(self) -> str:
        """Return the ids as a text that ``parse`` reads."""
        return json.dumps([self.end, *self.holes])


def parse(told: str) -> TokenIds:
    """Return the ids that ``TokenIds.told`` has written."""
    end, *holes = json.loads(told)
    return TokenIds(end, tuple(holes))


def among(ids: Iterable[int], rows: int) -> TokenIds:
    """Return which of the first ``rows`` ids have a token, of a tokenizer that has ``ids``."""
    known = {number for number in ids if 0 <= number < rows}
    end = max(known, default=-1) + 1
    return TokenIds(end, tuple(number for number in range(end) if number not in known))


def note(model: Any, tokenizer: Any) -> None:
    """Have a policy know which of its rows have a token of its tokenizer; its copies know it too.

    Raises ValueError for a tokenizer without a token that the policy has.
    """
    ids = among(tokenizer.get_vocab().values(), _rows(model))
    if not ids.count:
        raise ValueError("the policy's tokenizer has no token: write its folder again")
    model.token_ids = ids


def of(model: Any) -> TokenIds:
    """Return which rows of a policy have a token: those that were noted, or else all."""
    noted: TokenIds | None = getattr(model, "token_ids", None)
    return noted or TokenIds(_rows(model))


def _rows(model: Any) -> int:
    return int(model.get_output_embeddings().weight.shape[0])

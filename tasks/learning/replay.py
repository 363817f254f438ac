"""The replay buffer of a reward model: which trees it holds, and balanced draws from it. Pure.

Nothing is copied: the buffer refers to trees and rewards that earlier sub-steps have written. What
is drawn is decided by counters, so a run that was killed draws the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from params.schema.reward_model import Again
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact

MEBIBYTE = 2**20
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Scored:
    """The trees of a batch, and the table of their rewards."""

    trees: Artifact
    rewards: Artifact


@dataclass(frozen=True)
class Buffer:
    """The trees that the first model learned from, and the batches of the newest iterations.

    **Chosen**: the former stay. In a trial without them, few trees with labels were left after
    some iterations, a model learned these by heart, and the policy what it got wrong.
    """

    first: tuple[Scored, ...]
    iterations: tuple[tuple[Scored, ...], ...] = ()  # the oldest first

    @property
    def batches(self) -> list[Scored]:
        """Return all batches, in the order of time."""
        return [*self.first, *(batch for newest in self.iterations for batch in newest)]

    def add(self, batches: Sequence[Scored], limits: Again) -> Buffer:
        """Return the buffer with one more iteration, and without those beyond the limits.

        The newest iteration stays, whatever its size.
        """
        newest = (*self.iterations, tuple(batches))[-limits.iterations :]
        while len(newest) > 1 and mebibytes(Buffer(self.first, newest).batches) > limits.mebibytes:
            newest = newest[1:]
        return Buffer(self.first, newest)


def mebibytes(batches: Sequence[Scored]) -> float:
    """Return the size of the trees on the disk."""
    return sum(artifacts.size(Path(batch.trees.path)) for batch in batches) / MEBIBYTE


@dataclass(frozen=True)
class Example:
    """A trajectory with its label."""

    tree: int  # place in the buffer
    leaf: int  # in the tree
    question: str
    success: bool


def balanced(examples: Sequence[Example], batch: int, key: Sequence[int]) -> Places:
    """Draw ``batch`` places: the first half successes, the second failures, with replacement.

    ``key`` decides: seed, iteration and step. Raises ValueError without one of each.
    """
    generator = np.random.default_rng(list(key))
    kinds = [_places(examples, success) for success in (True, False)]
    if not all(len(places) for places in kinds):
        raise ValueError(f"all of the {len(examples)} trajectories have the same label")
    return np.concatenate([generator.choice(places, batch // 2) for places in kinds])


def pairs(examples: Sequence[Example], batch: int, key: Sequence[int]) -> Places:
    """Draw as ``balanced``: entry i and entry ``batch`` / 2 + i answer the same question.

    Each question that has both kinds is as likely as the others. Raises ValueError without any.
    """
    generator = np.random.default_rng(list(key))
    found = _of_questions(examples)
    if not found:
        raise ValueError("no question has trajectories with different labels")
    chosen = generator.integers(len(found), size=batch // 2)
    drawn = [[generator.choice(kind) for kind in found[place]] for place in chosen]
    return np.array(drawn, np.int64).T.ravel()


def _places(examples: Sequence[Example], success: bool) -> list[int]:
    return [place for place, one in enumerate(examples) if one.success == success]


def _of_questions(examples: Sequence[Example]) -> list[tuple[list[int], list[int]]]:
    """Return the places of successes and failures of each question that has both."""
    found: dict[str, tuple[list[int], list[int]]] = {}
    for place, one in enumerate(examples):
        found.setdefault(one.question, ([], []))[0 if one.success else 1].append(place)
    return [both for both in found.values() if all(both)]


DRAWS: Mapping[str, Callable[[Sequence[Example], int, Sequence[int]], Places]] = {
    "classification": balanced,
    "pairs": pairs,
}

"""The replay buffer of a reward model: which trees it holds, and balanced draws from it. Pure.

Nothing is copied: the buffer refers to trees and rewards that earlier sub-steps have written. What
is drawn is decided by counters, so a run that was killed draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence
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
class ScoredTrees:
    """The trees of a batch, and the table of their rewards."""

    trees: Artifact
    rewards: Artifact


@dataclass(frozen=True)
class Buffer:
    """The trees that the first model learned from, and the batches of the newest iterations.

    **Chosen**: the former stay. In a trial without them, few trees with labels were left after
    some iterations, a model learned these by heart, and the policy what it got wrong.
    """

    first: tuple[ScoredTrees, ...]
    iterations: tuple[tuple[ScoredTrees, ...], ...] = ()  # the oldest first

    @property
    def batches(self) -> list[ScoredTrees]:
        """Return all batches, in the order of time."""
        return [*self.first, *(batch for newest in self.iterations for batch in newest)]

    def add(self, batches: Sequence[ScoredTrees], limits: Again) -> Buffer:
        """Return the buffer with one more iteration, and without those beyond the limits.

        The newest iteration stays, whatever its size.
        """
        newest = (*self.iterations, tuple(batches))[-limits.iterations :]
        while len(newest) > 1 and mebibytes(Buffer(self.first, newest).batches) > limits.mebibytes:
            newest = newest[1:]
        return Buffer(self.first, newest)


def mebibytes(batches: Sequence[ScoredTrees]) -> float:
    """Return the size of the trees on the disk."""
    return sum(artifacts.size(Path(batch.trees.path)) for batch in batches) / MEBIBYTE


@dataclass(frozen=True)
class Example:
    """A trajectory with its label."""

    tree: int  # place in the buffer
    leaf: int  # in the tree
    question: str
    success: bool
    newest: bool = False  # of an iteration, and not of the trees that the first model learned from


def draw(examples: Sequence[Example], kind: str, batch: int, key: Sequence[int]) -> Places:
    """Draw ``batch`` places: the first half succeeded, the second failed, with replacement.

    ``kind``: classification, or pairs, where entry i and entry ``batch`` / 2 + i answer the same
    question. ``key`` decides: seed, iteration and step. **Chosen**: half of a batch is of the
    newest iterations, however few they are, for they show what the policy does now.

    Raises ValueError where there are no two kinds to draw.
    """
    groups = [_group(examples, newest, kind) for newest in (False, True)]
    able = [group for group in groups if group]
    if not able:
        raise ValueError(f"{FAULTS[kind]} (of {len(examples)})")
    generator = np.random.default_rng(list(key))
    sizes = [batch // 2 // len(able)] * len(able)
    sizes[-1] += batch // 2 - sum(sizes)
    drawn = [_pairs(group, size, generator) for group, size in zip(able, sizes, strict=True)]
    return np.concatenate(drawn).T.ravel()


Group = list[tuple[list[int], list[int]]]  # places of successes and failures, of each question
FAULTS = {
    "classification": "all trajectories have the same label",
    "pairs": "no question has trajectories with different labels",
}


def _group(examples: Sequence[Example], newest: bool, kind: str) -> Group:
    """Return what one half of a batch can be drawn from; for classification, as one question."""
    found: dict[str, tuple[list[int], list[int]]] = {}
    for place, one in enumerate(examples):
        if one.newest == newest:
            name = one.question if kind == "pairs" else ""
            found.setdefault(name, ([], []))[0 if one.success else 1].append(place)
    return [both for both in found.values() if all(both)]


def _pairs(group: Group, size: int, generator: np.random.Generator) -> Places:
    """Draw pairs of a success and a failure, each question as likely as the others: [size, 2]."""
    chosen = generator.integers(len(group), size=size)
    drawn = [[generator.choice(kind) for kind in group[place]] for place in chosen]
    return np.array(drawn, np.int64).reshape(size, 2)

"""The replay buffer of a reward model: which trees it holds, and balanced draws from it. Pure.

Nothing is copied: the buffer refers to trees and rewards that earlier sub-steps have written. What
is drawn is decided by counters, so a run that was killed draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from params.schema.reward_model import Again
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact

MEBIBYTE = 2**20
Places = NDArray[np.int64]


@dataclass(frozen=True)
class ScoredTrees:
    """The trees of a batch, the table of their rewards, and that of the rewards' parts."""

    trees: Artifact
    rewards: Artifact
    parts: Artifact | None = None


@dataclass(frozen=True)
class Buffer:
    """The trees that the first model learned from, and the batches of the newest iterations.

    **Chosen**: the former stay. In a trial without them, few trees with labels were left after
    some iterations, a model learned these by heart, and the policy what it got wrong.
    """

    first_batches: tuple[ScoredTrees, ...]
    iterations: tuple[tuple[ScoredTrees, ...], ...] = ()  # the oldest first

    @property
    def batches(self) -> list[ScoredTrees]:
        """Return all batches, in the order of time."""
        return [*self.first_batches, *_flat(self.iterations)]

    def add(self, batches: Sequence[ScoredTrees], limits: Again) -> Buffer:
        """Return the buffer with one more iteration, and without those beyond the limits.

        The newest iteration stays, whatever its size.
        """
        newest = (*self.iterations, tuple(batches))[-limits.iterations :]
        while len(newest) > 1 and mebibytes(_flat(newest)) > limits.mebibytes:
            newest = newest[1:]
        return Buffer(self.first_batches, newest)


def _flat(iterations: Sequence[tuple[ScoredTrees, ...]]) -> list[ScoredTrees]:
    return [batch for iteration in iterations for batch in iteration]


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
    question. ``key`` decides: seed, iteration and step. **Chosen**: half of the successes and half
    of the failures are of the newest iterations, however few they are, for they show what the
    policy does now; where one age has none, the other gives all. Pairs are of one age, so
    questions whose newest trajectories all have the same label give none.

    Raises ValueError where there are no two kinds to draw.
    """
    if not examples:
        raise ValueError("no trajectory has a label")
    return DRAWS[kind](examples, batch // 2, np.random.default_rng(list(key))).T.ravel()


Group = list[tuple[list[int], list[int]]]  # places of successes and failures, of each question


def _by_label(examples: Sequence[Example], size: int, generator: np.random.Generator) -> Places:
    """Draw a success and a failure, each as likely as the others of its age: [size, 2]."""
    columns = []
    for success in (True, False):
        ages = [
            [
                at
                for at, one in enumerate(examples)
                if (one.success, one.newest) == (success, newest)
            ]
            for newest in (False, True)
        ]
        drawn = [
            generator.choice(age, count)
            for age, count in _shared(ages, size, "all trajectories have the same label")
        ]
        columns.append(np.concatenate(drawn))
    return np.stack(columns, axis=1)


def _by_question(examples: Sequence[Example], size: int, generator: np.random.Generator) -> Places:
    """Draw a success and a failure of one question, each question as likely: [size, 2]."""
    ages = [_questions(examples, newest) for newest in (False, True)]
    fault = "no question has trajectories with different labels"
    drawn = [
        [generator.choice(kind) for kind in age[index]]
        for age, count in _shared(ages, size, fault)
        for index in generator.integers(len(age), size=count)
    ]
    return np.array(drawn, np.int64)


DRAWS = {"classification": _by_label, "pairs": _by_question}


def _questions(examples: Sequence[Example], newest: bool) -> Group:
    """Return the trajectories of each question that has both kinds."""
    by_question: dict[str, tuple[list[int], list[int]]] = {}
    for index, one in enumerate(examples):
        if one.newest == newest:
            by_question.setdefault(one.question, ([], []))[0 if one.success else 1].append(index)
    return [both for both in by_question.values() if all(both)]


def _shared(ages: Sequence[list[Any]], size: int, fault: str) -> list[tuple[list[Any], int]]:
    """Return each age that has something, with how many to draw of it; the newest has the rest.

    Raises ValueError with ``fault`` where none has.
    """
    able = [age for age in ages if age]
    if not able:
        raise ValueError(fault)
    counts = [size // len(able)] * len(able)
    counts[-1] += size - sum(counts)
    return list(zip(able, counts, strict=True))

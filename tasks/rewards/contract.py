"""The contract of a part of the reward: a recipe lists parts, and the reward is their sum.

A file of this room holds a PartKind, and its name is the file's. A user's part is a function in a
file of ``own/``, named by its path (``own/brevity.py:brevity``; see function.py). It imports what
it needs from ``beamline.rewards``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from params.schema.base import Frozen
from tasks.trees.tree import Node, Observation, Question, sampled

NOT_ASKED = "not_asked"  # in the breakdown of an answer that nothing has scored


def was_scored(breakdown: Any) -> bool:
    """Return whether an answer has been scored, by its breakdown: a mapping, or pairs.

    Otherwise its score is 0 and it counts as no success.
    """
    return NOT_ASKED not in dict(breakdown)


@dataclass(frozen=True)
class Ending:
    """A whole trajectory, as the parts of its reward read it."""

    question: Question
    leaf: int  # in its tree, from 0
    trajectory: Sequence[Node]  # from the root to the leaf, with turns joined from parts
    text: str  # the agent's own words, without tool results and observations
    answer: str | None  # the final answer, where there is one; None in a world
    faults: Sequence[str]  # what is wrong with the format
    breakdown: Mapping[str, float]  # of the scorer: "score", and the measures behind it
    tools: frozenset[str]  # of which a call worked
    world: bool = False  # an episode of a world, which has no answer: its observations are scored
    format_counts: bool = True  # the recipe's list has the part ``format``
    estimate: float | None = None  # the reward model's probability of success; None: it has none

    @property
    def score(self) -> float:
        """Return the score of the answer, or of the episode; 0 where there is none."""
        return self.breakdown.get("score", 0.0)

    @property
    def sound(self) -> bool:
        """Return whether the format is sound, with an answer if one is due, or does not count."""
        due = not self.world
        return not self.format_counts or not (self.faults or (due and self.answer is None))

    @property
    def success(self) -> bool:
        """Return whether this is a success: the highest score in a sound format."""
        return self.score == 1 and self.sound

    @property
    def observations(self) -> list[Observation]:
        """Return what a world answered to the agent's turns, in order."""
        return [turn.observation for turn in sampled(self.trajectory) if turn.observation]


Part = Callable[[Sequence[Ending]], list[float]]  # the endings of a batch -> a value each


@dataclass(frozen=True)
class PartKind:
    """A kind of part: its settings in a recipe, how to open it, and the range of its values.

    ``range(settings)`` may be infinite. ``faults(settings)`` returns one line for each setting that
    cannot work. ``label(name, settings)`` names the part in tables and metrics. ``scorers`` are the
    names of the scorers that it uses.
    """

    settings: type[Frozen]
    open: Callable[[Any], AbstractContextManager[Part]]
    range: Callable[[Any], tuple[float, float]]
    faults: Callable[[Any], list[str]] = lambda settings: []
    label: Callable[[str, Any], str] = lambda name, settings: name
    scorers: Callable[[Any], tuple[str, ...]] = lambda settings: ()


def plain(value: Callable[[Any, Ending], float]) -> Callable[[Any], AbstractContextManager[Part]]:
    """Return how to open a part whose value is a function of its settings and one ending."""

    def opened(settings: Any) -> AbstractContextManager[Part]:
        return nullcontext(lambda endings: [value(settings, ending) for ending in endings])

    return opened

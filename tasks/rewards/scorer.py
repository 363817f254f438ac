"""The part ``scorer``: a named scorer on the answer, whatever the question's own scorer is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from params.schema.base import Float, Frozen
from tasks.rewards.contract import Ending, Part, PartKind
from tasks.scorers import MOST_TIMEOUTS, WORKERS, judge, label, open_scorers, scorer_fault
from tasks.scorers.contract import ScorerKind


class ScorerPart(Frozen):
    """The settings: the score is multiplied by ``weight``."""

    name: str  # of a file in tasks/scorers, or a user's function: own/close.py:close
    weight: Float = 1.0


@contextmanager
def open_part(settings: ScorerPart) -> Iterator[Part]:
    """Keep the scorer ready. Each question has a budget of slow answers of its own."""
    with open_scorers([settings.name]) as scorers, ThreadPoolExecutor(WORKERS) as threads:

        def part(endings: Sequence[Ending]) -> list[float]:
            trees: dict[int, list[Ending]] = {}  # by question object: each tree has its own
            for ending in endings:
                trees.setdefault(id(ending.question), []).append(ending)
            compared = threads.map(partial(_scores, scorers[settings.name]), trees.values())
            scores = dict(zip(trees, compared, strict=True))
            return [
                settings.weight * scores[id(ending.question)][ending.answer] * ending.sound
                for ending in endings
            ]

        yield part


def _scores(kind: ScorerKind, tree: Sequence[Ending]) -> dict[str | None, float]:
    """Return the score of each different answer of a tree; 0 where there is none."""
    compare, accepted = kind.limited(MOST_TIMEOUTS), tree[0].question.answers
    return {
        answer: 0.0 if answer is None else compare(answer, accepted)["score"]
        for answer in dict.fromkeys(ending.answer for ending in tree)
    }


def bounds(settings: ScorerPart) -> tuple[float, float]:
    """Return the lowest and the highest value."""
    return min(0.0, settings.weight), max(0.0, settings.weight)


def faults(settings: ScorerPart) -> list[str]:
    """Return a line where the scorer cannot be used."""
    fault = scorer_fault(settings.name)
    if settings.name == judge.NAME:
        fault = "a judge scores a question's answer: name it as 'scorer' of a set, and use 'answer'"
    return [f"name: {fault}"] if fault else []


PART = PartKind(
    ScorerPart,
    open_part,
    bounds,
    faults,
    label=lambda name, settings: f"{name}_{label(settings.name)}",
    scorers=lambda settings: (settings.name,),
)

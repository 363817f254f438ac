"""Which questions a batch asks where those that taught nothing come back later. Pure.

A group whose answers all have one score has no advantage, so its question was too easy or too hard
for the policy that was asked. With ``reinforce.curriculum`` such a question is left out of the next
passes over the questions. Counters and earlier batches decide, nothing is drawn: a run that was
killed asks the same questions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tasks.rollout import pass_order


@dataclass(frozen=True)
class Chosen:
    """The questions of a batch."""

    passes: Mapping[str, int] = field(default_factory=dict)  # question -> pass, in order
    place: int = 0  # the next one of the endless sequence of passes


def choose(
    ids: Sequence[str],
    seed: int,
    first: int,
    size: int,
    due: Mapping[str, int],
    asked: Collection[str] = (),
) -> Chosen:
    """Return the questions of a batch that begins at place ``first`` of the passes.

    ``due``: question -> the first pass in which it may be asked again. ``asked``: those that this
    iteration has asked already. The batch is smaller where no other question is left; where all
    rest, the passes in which they do are skipped.
    """
    found: dict[str, int] = {}
    orders: dict[int, list[int]] = {}
    place, last = first, max(first // len(ids) + 1, *due.values(), 0)
    while len(found) < size and place // len(ids) <= last:
        number, index = divmod(place, len(ids))
        if number not in orders:
            orders[number] = pass_order(len(ids), seed, number)
        question = ids[orders[number][index]]
        if number >= due.get(question, 0) and question not in asked:
            found.setdefault(question, number)
        place += 1
    return Chosen(found, place)


def due_after(
    passes: Mapping[str, int], without_spread: Collection[str], rest: int
) -> Mapping[str, int]:
    """Return when questions may be asked again: those without spread ``rest`` passes later."""
    return {
        question: number + 1 + (rest if question in without_spread else 0)
        for question, number in passes.items()
    }

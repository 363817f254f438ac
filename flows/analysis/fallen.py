"""Find the question with which to begin reading, where a run came out worse than hoped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq

from flows.tracking import traces
from params.run_folders import RunFolders

COLUMNS = ["iteration", "question", "kind", "leaf", "reward", "success"]
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Fallen:
    """A question of the training, and its leaf with the lowest reward, in an iteration."""

    iteration: int
    question: str
    kind: str
    leaf: int
    success: float  # share of its leaves
    before: float | None  # the same when it was asked first; None where it was asked once


def worst(recipe: str, kinds: Collection[str] = ()) -> Fallen | None:
    """Return the question of a training whose success has fallen most since it was first asked.

    Where none has fallen, the one of the last iteration with the lowest success, of ``kinds`` if
    any is of them. None where every leaf there succeeds, or the run has left no trees.
    """
    file = RunFolders(recipe).trees / "rewards.parquet"
    if not file.is_file():
        return None
    asked: dict[str, dict[int, Rows]] = defaultdict(lambda: defaultdict(list))
    rows = pq.read_table(file, columns=COLUMNS).to_pylist()
    for row in rows:
        asked[row["question"]][row["iteration"]].append(row)
    fell = [
        one for one in map(_compared, asked.values()) if one.before and one.success < one.before
    ]
    if fell:
        return min(fell, key=lambda one: (one.success - (one.before or 0), -one.iteration))
    last = max((row["iteration"] for row in rows), default=0)
    newest = [_of(by[last], None) for by in asked.values() if last in by]
    failed = [one for one in newest if one.success < 1]
    return min(failed, key=lambda one: (one.kind not in kinds, one.success), default=None)


def lost(recipe: str, against: str) -> list[tuple[str, str]]:
    """Return the held-out questions that ``against`` has answered and "trained" no longer does.

    Each as its id and its kind; success is the mean of its answers. [] without an evaluation.
    """
    file = RunFolders(recipe).evaluation
    if not file.is_file():
        return []
    successes: dict[tuple[str, str], dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    columns = ["agent", "question", "kind", "success"]
    for row in pq.read_table(file, columns=columns).to_pylist():
        successes[row["question"], row["kind"]][row["agent"]].append(row["success"])
    return [
        question
        for question, by_agent in successes.items()
        if {"trained", against} <= {*by_agent}
        and fmean(by_agent["trained"]) < fmean(by_agent[against])
    ]


def begin(recipe: str, lost: Sequence[tuple[str, str]], kinds: Collection[str]) -> tuple[str, str]:
    """Return where to begin reading: the place in the run's page, and in words what is there.

    A held-out question that is ``lost`` comes before one of the training; see ``worst``. Both are
    "" where nothing is worse.
    """
    if lost:
        question, kind = lost[0]
        which = f"{question} ({kind}) of the evaluation, which was answered before"
        return _fragment(recipe, traces.EVALUATION, question, 0), which
    fallen = worst(recipe, kinds)
    if fallen is None:
        return "", ""
    return fragment(recipe, fallen), sentence(fallen)


def fragment(recipe: str, fallen: Fallen) -> str:
    """Return the part of an address that opens a question in the page of its run."""
    return _fragment(recipe, fallen.iteration, fallen.question, fallen.leaf)


def _fragment(recipe: str, iteration: int | str, question: str, leaf: int) -> str:
    address = traces.place_in_page(recipe, iteration, question, leaf)
    return "#" + address.partition("#")[2]


def sentence(fallen: Fallen) -> str:
    """Return what is wrong with a question, in words."""
    share = f"{100 * fallen.success:.0f} %"
    if fallen.before is not None:
        share = f"{100 * fallen.before:.0f} → {share}"
    return f"{fallen.question} ({fallen.kind}) in iteration {fallen.iteration}, success {share}"


def _compared(by_iteration: Mapping[int, Rows]) -> Fallen:
    first, last = min(by_iteration), max(by_iteration)
    before = _share(by_iteration[first]) if first < last else None
    return _of(by_iteration[last], before)


def _of(rows: Rows, before: float | None) -> Fallen:
    lowest = min(rows, key=lambda row: (row["success"], row["reward"]))
    return Fallen(
        iteration=lowest["iteration"],
        question=lowest["question"],
        kind=lowest["kind"],
        leaf=lowest["leaf"],
        success=_share(rows),
        before=before,
    )


def _share(rows: Rows) -> float:
    return fmean(row["success"] for row in rows)

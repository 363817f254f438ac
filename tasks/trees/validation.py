"""How policies did on the panel of the validation split, in the course of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact, Record
from tasks.trees.intervals import bootstrap_interval
from tasks.trees.tables import read_rows

MEASURES = ("success", "score")
RESAMPLES = 2000  # of the intervals


@dataclass(frozen=True)
class Validated:
    """What a policy got for each question of the panel; a question counts once, with its mean."""

    iterations: int  # that the policy has learned from; 0: the one that training began with
    values: Mapping[str, Mapping[str, float]]  # of MEASURES: question -> mean of its answers
    finished: float  # when it was asked, in unix seconds

    def mean(self, measure: str) -> float:
        """Return the mean over the questions."""
        return float(np.mean(list(self.values[measure].values())))


def validated(records: Sequence[Record]) -> list[Validated]:
    """Return what the policies got, from the records of their exams in the order of asking."""
    return [_validated(record) for record in records if record["verb"] == "reward"]


def _validated(record: Record) -> Validated:
    rewards = artifacts.output(record, "rewards")
    return answered(record["step"]["iteration"], rewards, record["finished"])


def answered(iterations: int, rewards: Artifact, finished: float = 0.0) -> Validated:
    """Return what a policy got that has learned from so many iterations, from its rewards."""
    rows = read_rows(Path(rewards.path))
    values = {"success": _by_question(rows, _success), "score": _by_question(rows, _score)}
    return Validated(iterations, values, finished)


def _success(row: Mapping[str, Any]) -> float:
    return float(row["success"])


def _score(row: Mapping[str, Any]) -> float:
    return float(row["score"]) * row["sound"]  # as the verdict counts it


def _by_question(rows: Sequence[Mapping[str, Any]], value: Any) -> dict[str, float]:
    by_question: dict[str, list[float]] = {}
    for row in rows:
        by_question.setdefault(row["question"], []).append(value(row))
    return {question: sum(values) / len(values) for question, values in sorted(by_question.items())}


def best(policies: Sequence[Validated], measure: str) -> Validated:
    """Return the policy with the highest mean, the earliest of equal ones.

    The policy that training began with is none of them. Raises ValueError where no other was asked.
    """
    trained = [one for one in policies if one.iterations > 0]
    if not trained:
        raise ValueError("no policy that training has made was asked the validation questions")
    return max(trained, key=lambda one: (one.mean(measure), -one.iterations))


def differences(now: Validated, before: Validated, measure: str) -> NDArray[np.float64]:
    """Return the difference for each question that both were asked. [Q]"""
    ours, theirs = now.values[measure], before.values[measure]
    return np.array([ours[question] - theirs[question] for question in ours if question in theirs])


def points(policies: Sequence[Validated], seed: int) -> list[dict[str, float]]:
    """Return a row a policy: ``iteration`` (those it has learned from), means and 95 % intervals.

    The policy with which iteration k begins has learned from k iterations; so the row k belongs to
    the same policy as the training metrics of iteration k, which it sampled.
    """
    rows = []
    for one in policies:
        row: dict[str, float] = {"iteration": one.iterations}
        for measure in MEASURES:
            values = np.array(list(one.values[measure].values()))
            low, high = bootstrap_interval(values, RESAMPLES, seed)
            row |= {measure: one.mean(measure), f"{measure}_low": low, f"{measure}_high": high}
        rows.append(row)
    return rows

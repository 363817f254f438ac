"""Expectations of the table of rewards of all iterations: one row a leaf of a question's tree.

Columns: iteration, leaf (int, from 0), question, kind, outcome (how the leaf ended), scorer (str),
reward, score (float), success (bool), answer (str, None where none could be extracted), faults
(list[str], what is wrong with the format), breakdown (the scorer's measures by name, as a mapping
or as pairs; empty where there was no answer to score), estimate (float, the reward model's
probability of success; missing in all rows where there is no reward model).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tasks.gates.gate import Expectation, among, between, legible, rows_between, unusable
from tasks.gates.leaves import group_columns, keys
from tasks.rewards.reward_parts import FORMAT
from tasks.rewards.scoring import WORLD

GROUP = ("iteration", "question")
LEAF = (*GROUP, "leaf")
NAMES = ("question", "kind", "outcome", "scorer")
COLUMNS = (*LEAF, "kind", "outcome", "scorer", "reward", "score", "success", "faults")
SCORED = ("reward", "score", "success", "answer", "faults", "breakdown", "scorer")
ROUNDING = 1e-9  # of sums of parts
PARTS = (*LEAF, "part", "value")


def prepare(
    table: pd.DataFrame,
    leaves: pd.MultiIndex,
    parts: pd.DataFrame,
    broken_format: float | None,
    silent: Collection[str],
) -> pd.DataFrame:
    """Add the columns that ``expectations`` check. Raises ValueError for a missing column.

    leaves: (iteration, question, leaf) of every leaf of the trees. parts: what each part of the
    reward gave to each leaf (columns PARTS). broken_format: what a broken format earns, None where
    it does not count. silent: the parts that give nothing else there.
    """
    table = table.reset_index(drop=True)
    faults = unusable("rewards", table, COLUMNS, NAMES)
    table = table.assign(unusable=faults, **legible(table, NAMES))
    rows: list[Any] = table.reindex(columns=list(SCORED)).to_dict("records")
    counts = broken_format is not None
    formed = _sums(table, parts[parts["part"].isin(list(silent))])
    of_format = _sums(table, parts[parts["part"] == FORMAT])
    return table.assign(
        **group_columns(table, GROUP),
        of_a_tree=keys(table, LEAF).isin(leaves),
        parts_off_by=table["reward"] - _sums(table, parts),
        broken_fault=[
            "" if broken_format is None else broken_fault(row, whole, alone, broken_format)
            for row, whole, alone in zip(rows, formed, of_format, strict=True)
        ],
        success_fault=[success_fault(row, counts) for row in rows],
        breakdown_fault=[breakdown_fault(row) for row in rows],
        estimate_fault=_estimate_faults(table),
    ).set_index(list(LEAF), drop=False)


def _estimate_faults(table: pd.DataFrame) -> NDArray[np.str_]:
    """Describe what is wrong with the reward model's estimate of each leaf, or return ""."""
    estimates = table.reindex(columns=["estimate"])["estimate"].to_numpy(float)
    missing = np.isnan(estimates)
    outside = ~missing & ~((estimates >= 0) & (estimates <= 1))
    faults = [missing & ~missing.all(), outside]
    return np.select(faults, ["no estimate, and other leaves have one", "outside [0, 1]"], "")


def _sums(table: pd.DataFrame, parts: pd.DataFrame) -> pd.Series:
    """Return the sum of these parts for each leaf of the table, 0 where there are none."""
    sums = parts.groupby(list(LEAF))["value"].sum()
    sums_of_leaves = sums.reindex(keys(table, LEAF)).fillna(0.0)
    return pd.Series(sums_of_leaves.to_numpy(), index=table.index)


def expectations(
    *,
    rows: int,
    leaves: int,
    outcomes: Collection[str],
    scorers: Collection[str],
    reward: tuple[float, float],
) -> list[Expectation]:
    """Return the expectations for ``rows`` leaves in all and ``leaves`` (L) leaves a group.

    outcomes, scorers: all known names. reward: (lowest, highest), which may be infinite.
    """
    lowest, highest = reward
    low = lowest - ROUNDING if math.isfinite(lowest) else None
    high = highest + ROUNDING if math.isfinite(highest) else None
    within = between(f"the reward is in [{lowest:g}, {highest:g}]", "reward", low, high)
    return [
        rows_between("there are rewards", 1, None),
        rows_between(f"there are {rows} rows, one a leaf", rows, rows),
        among("every value is present and finite, names are printable", "unusable", [""]),
        among("the leaf is one of the trees'", "of_a_tree", [True]),
        between(f"a question has {leaves} leaves an iteration", "group_size", leaves, leaves),
        between("a group's leaves are numbered from 0 on, each once", "leaf_off_by", 0, 0),
        among("the outcome is known", "outcome", outcomes),
        among("the scorer is known", "scorer", scorers),
        *([within] if low is not None or high is not None else []),
        between("the parts of a reward add up to it", "parts_off_by", -ROUNDING, ROUNDING),
        between("the score is in [0, 1]", "score", 0, 1),
        among("a broken format's reward goes to broken formats alone", "broken_fault", [""]),
        among("a success has score 1 and a sound format", "success_fault", [""]),
        among("an answer's score is in its breakdown", "breakdown_fault", [""]),
        among("estimates are in [0, 1], of all leaves or of none", "estimate_fault", [""]),
    ]


def broken_fault(
    row: Mapping[str, Any], formed: float, of_format: float, broken_format: float
) -> str:
    """Describe how the reward contradicts the format, or return "".

    Exactly the leaves with a faulty format or without an answer earn ``broken_format``: ``formed``
    is the sum of the parts that depend on the format, ``of_format`` the one that is for it alone.
    """
    if broken := _broken(row):
        return f"reward {formed} in spite of {broken}" if formed != broken_format else ""
    return f"reward {of_format} with an answer and a sound format" if of_format else ""


def success_fault(row: Mapping[str, Any], format_counts: bool = True) -> str:
    """Describe what a success lacks, or return ""; also "" for a leaf without success."""
    if not row["success"]:
        return ""
    if format_counts and (broken := _broken(row)):
        return f"success in spite of {broken}"
    return "" if row["score"] == 1 else f"success with score {row['score']}"


def breakdown_fault(row: Mapping[str, Any]) -> str:
    """Describe what is wrong with an answer's breakdown, or return ""; "" without an answer."""
    if not isinstance(row["answer"], str):
        return ""
    if not isinstance(row["breakdown"], Mapping | list | tuple | np.ndarray):
        return "no breakdown"
    measures = dict(row["breakdown"])
    for name, value in measures.items():
        if value is None or not math.isfinite(value):
            return f"{name} is {value}"
    if "score" not in measures:
        return f"no score among {', '.join(map(str, measures)) or 'nothing'}"
    if measures["score"] != row["score"]:
        return f"score {measures['score']} there and {row['score']} in the row"
    return ""


def _broken(row: Mapping[str, Any]) -> str:
    """Describe why the format counts as broken, or return ""."""
    faults = [] if row["faults"] is None else list(row["faults"])
    if faults:
        return f"faults {', '.join(map(str, faults))}"
    return "" if isinstance(row["answer"], str) or row["scorer"] == WORLD else "no answer"

"""Expectations of the table of advantages of all iterations: one row a leaf of a question's tree.

Columns: iteration, leaf (int, from 0), question (str), advantage (float).
"""

from __future__ import annotations

import pandas as pd

from tasks.gates.gate import Expectation, among, between, legible, rows_between, unusable
from tasks.gates.leaves import group_columns, keys

GROUP = ("iteration", "question")
LEAF = (*GROUP, "leaf")
COLUMNS = (*LEAF, "advantage")
ROUNDING = 1e-6  # of a group's mean, which sums rewards divided by their spread


def prepare(table: pd.DataFrame, rewards: pd.DataFrame) -> pd.DataFrame:
    """Add the columns that ``expectations`` check. Raises ValueError for a missing column.

    rewards: the table of the rewards, with the columns iteration, question, leaf and reward.
    """
    table = table.reset_index(drop=True)
    faults = unusable("advantages", table, COLUMNS, ["question"])
    table = table.assign(unusable=faults, **legible(table, ["question"]))
    groups = rewards.groupby(list(GROUP))["reward"]
    even = groups.min()[groups.min() == groups.max()].index
    without_spread = keys(table, GROUP).isin(even)
    return table.assign(
        **group_columns(table, GROUP),
        rewarded=keys(table, LEAF).isin(keys(rewards, LEAF)),
        group_mean=table.groupby(list(GROUP))["advantage"].transform("mean"),
        of_equal_rewards=table["advantage"].where(without_spread, 0.0),
    ).set_index(list(LEAF), drop=False)


def expectations(*, rows: int, leaves: int, centred: bool) -> list[Expectation]:
    """Return the expectations for ``rows`` rewards and ``leaves`` (L) leaves a group.

    centred: the estimator compares a leaf with the mean of its group (group-relative,
    leave-one-out), so the advantages of a group have mean 0 and are 0 where its rewards are equal.
    Other estimators guarantee neither.
    """
    centred_expectations = [
        between("a group's advantages have mean 0", "group_mean", -ROUNDING, ROUNDING),
        between("where a group's rewards are equal, none has credit", "of_equal_rewards", 0, 0),
    ]
    return [
        rows_between("there are advantages", 1, None),
        rows_between(f"there are {rows} rows, one a reward", rows, rows),
        among("every value is present and finite, names are printable", "unusable", [""]),
        among("the leaf has a reward", "rewarded", [True]),
        between(f"a question has {leaves} leaves an iteration", "group_size", leaves, leaves),
        between("a group's leaves are numbered from 0 on, each once", "leaf_off_by", 0, 0),
        *(centred_expectations if centred else []),
    ]

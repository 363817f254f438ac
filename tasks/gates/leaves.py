"""The groups of tables with a row a leaf: the leaves of one question's tree in one iteration."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd


def group_columns(table: pd.DataFrame, group: Sequence[str]) -> dict[str, pd.Series]:
    """``group_size``: the rows of a row's group; ``leaf_off_by``: 0 for each of them exactly when
    the leaves of the group are numbered 0, 1, 2, ..., each once."""
    by = list(group)
    place = table.sort_values([*by, "leaf"]).groupby(by).cumcount()
    return {
        "group_size": table.groupby(by)["leaf"].transform("size"),
        "leaf_off_by": table["leaf"] - place,
    }


def keys(table: pd.DataFrame, columns: Sequence[str]) -> pd.MultiIndex:
    """Which leaf each row is about."""
    return pd.MultiIndex.from_frame(table[list(columns)])

"""Columns about groups in tables with one row a leaf.

A group is the L leaves of one question's tree in one iteration.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd


def group_columns(table: pd.DataFrame, group: Sequence[str]) -> dict[str, pd.Series]:
    """Return the columns ``group_size`` and ``leaf_off_by``.

    ``group_size``: how many rows the row's group has. ``leaf_off_by``: 0 in all rows of a group iff
    its leaves are numbered 0, 1, 2, ..., each once.
    """
    by = list(group)
    positions = table.sort_values([*by, "leaf"]).groupby(by).cumcount()
    return {
        "group_size": table.groupby(by)["leaf"].transform("size"),
        "leaf_off_by": table["leaf"] - positions,
    }


def keys(table: pd.DataFrame, columns: Sequence[str]) -> pd.MultiIndex:
    """Return the values of ``columns``, which identify each row's leaf, as an index."""
    return pd.MultiIndex.from_frame(table[list(columns)])

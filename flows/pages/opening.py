"""Choose the question at which the page of a run opens: one that tells something."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pandas as pd

from flows.pages.forest import Tables

QUESTION = ["iteration", "question"]
DIGITS = 6  # of a spread, below which two are equal


def opening(tables: Tables, numbers: Collection[int]) -> dict[str, Any] | None:
    """Return iteration, question and leaf of the most telling question of these iterations.

    That is one whose leaves part at a branch, with the largest spread of rewards; of equal ones
    the first of the latest iteration. Where nothing branches, the spread alone counts. The leaf is
    the first that passes the branch. None where there is no question.
    """
    rewards = _of(tables, "rewards", ["reward"], numbers)
    if rewards.empty:
        return None
    spreads = rewards.groupby(QUESTION)["reward"].std(ddof=0).round(DIGITS)
    decisions = _of(tables, "decisions", ["node", "added"], numbers)
    branched = decisions[decisions["added"] > 0].groupby(QUESTION)["node"].first()
    # a question whose leaves all got the same tells nothing, wherever they part
    told = spreads[spreads.index.isin(branched.index) & (spreads > 0)]
    candidates = spreads if told.empty else told
    best = candidates[candidates == candidates.max()]
    latest = best.index.get_level_values("iteration").max()
    asked = tables["questions"].select(["iteration", "id"]).to_pandas()
    order = asked["id"][asked["iteration"] == latest]
    question = next(one for one in order if (latest, one) in best.index)
    leaf = _first_leaf(tables, latest, question, branched.get((latest, question)))
    return {"iteration": int(latest), "question": question, "leaf": leaf}


def _of(tables: Tables, name: str, columns: list[str], numbers: Collection[int]) -> pd.DataFrame:
    frame = tables[name].select([*QUESTION, *columns]).to_pandas()
    return frame[frame["iteration"].isin(numbers)]


def _first_leaf(tables: Tables, iteration: int, question: str, branch: int | None) -> int:
    """Return the first leaf whose path passes a node; 0 without one."""
    if branch is None:
        return 0
    every_leaf = _of(tables, "leaves", ["leaf", "node"], [iteration])
    every_node = _of(tables, "nodes", ["node", "parent"], [iteration])
    leaves = every_leaf[every_leaf["question"] == question]
    nodes = every_node[every_node["question"] == question]
    parents = dict(zip(nodes["node"], nodes["parent"], strict=True))
    for leaf, node in zip(leaves["leaf"], leaves["node"], strict=True):
        at = node
        while at >= 0 and at != branch:
            at = parents[at]
        if at == branch:
            return int(leaf)
    return 0

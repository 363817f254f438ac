"""The trajectories' gate: a good table passes, each planted fault is named."""

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks import gate
from tasks.expectations import trajectories

LEAVES = 4
LIMITS = {
    "leaves": LEAVES,
    "outcomes": ["answered", "cut"],
    "reward": (-1.0, 1.1),
    "response_tokens": 100,
    "tool_calls": 3,
}


def good():
    """Two iterations, three questions each, four leaves a question."""
    row = np.arange(24)
    return pd.DataFrame(
        {
            "iteration": row // 12,
            "question_id": [f"q{number // LEAVES % 3}" for number in row],
            "leaf": row % LEAVES,
            "outcome": ["answered", "cut"] * 12,
            "text": "text",
            "sampled_tokens": 60,
            "observed_tokens": 40,
            "logprob_count": 60,
            "highest_logprob": 0.0,
            "lowest_entropy": 0.0,
            "highest_entropy": 1.0,
            "tool_calls": row % 4,
            "reward": [1.1, -1.0] * 12,
            "advantage": [0.5, -0.5] * 12,
            "success": [True, False] * 12,
        }
    )


def check(table, folder):
    """The failed expectations of a table: {words: its offending rows as (row number, value)}."""
    verdict = folder / "trajectories.json"
    prepared = trajectories.prepare(table, failures=["cut"])
    try:
        gate.check(
            "trajectories",
            prepared,
            trajectories.expectations(**LIMITS),
            verdict,
            folder / "docs",
        )
    except gate.GateError as error:
        failed = [e for e in json.loads(verdict.read_text())["expectations"] if not e["passed"]]
        assert failed and all(each["expectation"] in str(error) for each in failed)
        return {each["expectation"]: [number(row) for row in each["rows"]] for each in failed}
    return {}


def number(row):
    place = row["iteration"] * 12 + int(row["question_id"][1]) * LEAVES + row["leaf"]
    return place, list(row.values())[-1]


def test_good_table_passes(tmp_path, capsys):
    assert check(good().sample(frac=1, random_state=0), tmp_path) == {}
    assert capsys.readouterr().out == ""


def test_mostly_failed_leaves_only_warn(tmp_path, capsys):
    assert check(good().assign(outcome="cut"), tmp_path) == {}
    assert "at most 90% of the leaves failed: observed 1.0" in capsys.readouterr().out


def test_each_fault_is_named(tmp_path):
    faults = [
        (0, "logprob_count", 59),
        (1, "highest_logprob", 0.01),
        (2, "lowest_entropy", -0.01),
        (3, "highest_entropy", 1.01),
        (4, "reward", 1.2),
        (5, "reward", -1.2),
        (6, "advantage", np.inf),
        (7, "advantage", np.nan),
        (8, "outcome", "lost"),
        (9, "observed_tokens", 41),
        (10, "tool_calls", 4),
        (11, "tool_calls", -1),
        (12, "highest_logprob", -np.inf),
        (16, "leaf", 2),  # leaves 1, 2, 2, 3
    ]
    table = good()
    for row, column, value in faults:
        table.loc[row, column] = value
    table.loc[13, ["sampled_tokens", "logprob_count"]] = 0
    assert check(table.drop(index=23), tmp_path) == {
        "every value is present and finite": [
            (6, "advantage=inf"),
            (7, "advantage=nan"),
            (12, "highest_logprob=-inf"),
        ],
        "a question has 4 leaves an iteration": [(20, 3), (21, 3), (22, 3)],
        "a group's leaves are numbered from 0 on, each once": [(18, 1), (17, 1)],
        "the outcome is known": [(8, "lost")],
        "at least one token is sampled": [(13, 0)],
        "there is one logprob a sampled token": [(0, -1)],
        "no logprob is above 0": [(1, 0.01)],
        "no entropy is below 0": [(2, -0.01)],
        "no entropy is above 1": [(3, 1.01)],
        "the response has at most 100 tokens": [(9, 101)],
        "there are at most 3 tool calls": [(10, 4), (11, -1)],
        "the reward is in [-1.0, 1.1]": [(4, 1.2), (5, -1.2)],
    }


def test_empty_table_is_refused(tmp_path):
    prepared = trajectories.prepare(good().iloc[:0], failures=["cut"])
    suite = trajectories.expectations(**LIMITS)
    with pytest.raises(gate.GateError, match="- there are trajectories: observed 0"):
        gate.check("trajectories", prepared, suite, tmp_path / "verdict", tmp_path / "docs")


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_group_is_exact_only_with_every_leaf_once(leaves):
    table = good().iloc[[0] * len(leaves)].assign(leaf=leaves)
    prepared = trajectories.prepare(table, failures=[])
    exact = (prepared["group_size"] == LEAVES).all() and (prepared["leaf_off_by"] == 0).all()
    assert exact == (sorted(leaves) == list(range(LEAVES)))

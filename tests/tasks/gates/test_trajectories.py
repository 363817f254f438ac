"""The trajectories' gate: a good table passes, each planted fault is named."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.gates import trajectories
from tests.tasks.gates.conftest import broken

LEAVES = 4
LIMITS = {
    "leaves": LEAVES,
    "outcomes": ["answered", "cut"],
    "response_tokens": 100,
    "tool_calls": 3,
}
PRESENT = "every value is present and finite, names are printable"
LOGPROBS = "there is one logprob a sampled token"
RESPONSE = "the response has at most 100 tokens"


def good(rows=24):
    """Iterations of three questions each, four leaves a question."""
    row = np.arange(rows)
    return pd.DataFrame(
        {
            "iteration": row // 12,
            "question_id": [f"q{number // LEAVES % 3}" for number in row],
            "leaf": row % LEAVES,
            "outcome": ["answered", "cut"] * (rows // 2),
            "text": "text",
            "sampled_tokens": 60,
            "observed_tokens": 40,
            "logprob_count": 60,
            "highest_logprob": 0.0,
            "lowest_entropy": 0.0,
            "highest_entropy": 1.0,
            "tool_calls": row % 4,
        }
    )


def suited(table):
    return trajectories.prepare(table, failures=["cut"]), trajectories.expectations(**LIMITS)


@pytest.fixture
def check(judge):
    return lambda table: judge("trajectories", *suited(table))


def row(number, **value):
    """How the row with this number is named."""
    question = f"q{number // LEAVES % 3}"
    return {"iteration": number // 12, "question_id": question, "leaf": number % LEAVES, **value}


def test_good_table_passes(check, capsys):
    assert check(good().sample(frac=1, random_state=0)) == {}
    assert capsys.readouterr().out == ""


def test_mostly_failed_leaves_only_warn(check, capsys):
    assert check(good().assign(outcome="cut")) == {}
    assert "at most 90% of the leaves failed: observed 1.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("column", "value", "words", "shown"),
    [
        ("outcome", None, PRESENT, {"unusable": "outcome=nan"}),
        ("highest_logprob", -np.inf, PRESENT, {"unusable": "highest_logprob=-inf"}),
        ("lowest_entropy", np.nan, PRESENT, {"unusable": "lowest_entropy=nan"}),
        ("outcome", "lost", "the outcome is known", {"outcome": "lost"}),
        ("logprob_count", 59, LOGPROBS, {"logprobs_too_many": -1}),
        ("logprob_count", 61, LOGPROBS, {"logprobs_too_many": 1}),
        ("highest_logprob", 0.01, "no logprob is above 0", {"highest_logprob": 0.01}),
        ("lowest_entropy", -0.01, "no entropy is below 0", {"lowest_entropy": -0.01}),
        ("highest_entropy", 1.01, "no entropy is above 1", {"highest_entropy": 1.01}),
        ("observed_tokens", 41, RESPONSE, {"response_tokens": 101}),
        ("sampled_tokens", 0, "at least one token is sampled", {"sampled_tokens": 0}),
        ("tool_calls", 4, "there are at most 3 tool calls", {"tool_calls": 4}),
        ("tool_calls", -1, "there are at most 3 tool calls", {"tool_calls": -1}),
    ],
)
def test_planted_fault_is_named(column, value, words, shown):
    table = good().astype(object)
    table.at[17, column] = value
    found = broken(*suited(table.infer_objects()))
    assert found.pop(words) == [row(17, **shown)]
    # no sampled token is one logprob too many; what is infinite or missing breaks no limit twice
    assert set(found) <= ({LOGPROBS} if column == "sampled_tokens" else set())


def test_missing_leaf_is_named(check):
    group = [row(number, group_size=3) for number in (20, 21, 22)]
    assert check(good().drop(index=23)) == {"a question has 4 leaves an iteration": group}


def test_leaf_twice_is_named(check):
    table = good()
    table.loc[16, "leaf"] = 2  # leaves 1, 2, 2, 3
    found = check(table)["a group's leaves are numbered from 0 on, each once"]
    assert [each["leaf_off_by"] for each in found] == [1, 1]


def test_empty_table_is_refused(check):
    assert check(good().iloc[:0]) == {"there are trajectories": 0}


def test_many_faults_at_once_are_named(check):
    """Each kind of expectation, by the gate itself."""
    table = good()
    table.loc[2, "outcome"], table.loc[5, "highest_logprob"] = "lost", 0.01
    table.loc[7, "tool_calls"], table.loc[9, "logprob_count"] = -1, 59
    assert check(table) == {
        "the outcome is known": [row(2, outcome="lost")],
        "no logprob is above 0": [row(5, highest_logprob=0.01)],
        "there are at most 3 tool calls": [row(7, tool_calls=-1)],
        LOGPROBS: [row(9, logprobs_too_many=-1)],
    }


def test_large_clean_table_passes(check):
    assert check(good(20_016)) == {}


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_group_is_exact_only_with_every_leaf_once(leaves):
    table = good().iloc[[0] * len(leaves)].assign(leaf=leaves)
    prepared = trajectories.prepare(table, failures=[])
    exact = (prepared["group_size"] == LEAVES).all() and (prepared["leaf_off_by"] == 0).all()
    assert exact == (sorted(leaves) == list(range(LEAVES)))

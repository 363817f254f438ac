"""The rewards' gate: a good table passes, each planted fault is named."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.gates import rewards
from tests.tasks.gates.conftest import broken

LEAVES = 4
LIMITS = {
    "leaves": LEAVES,
    "outcomes": ["answer", "cut"],
    "scorers": ["exact", "f1", "world"],
    "reward": (-1.0, 1.1),
}
PRESENT = "every value is present and finite, names are printable"
BROKEN = "a broken format's reward goes to broken formats alone"
SUCCESS = "a success has score 1 and a sound format"
ADD_UP = "the parts of a reward add up to it"
BREAKDOWN = "an answer's score is in its breakdown"
RANGE = "the reward is in [-1, 1.1]"

RIGHT = {
    "outcome": "answer",
    "reward": 1.0,
    "score": 1.0,
    "success": True,
    "answer": "4",
    "faults": [],
    "breakdown": {"score": 1.0, "precision": 1.0},
}
PARTLY = {**RIGHT, "reward": 0.5, "score": 0.5, "success": False, "breakdown": [("score", 0.5)]}
WRONG = {**PARTLY, "reward": 0.0, "score": 0.0, "breakdown": {"score": 0.0}}
MUTE = {**WRONG, "outcome": "cut", "reward": -1.0, "answer": None, "breakdown": None}


def good(rows=24):
    """Iterations of three questions each, four leaves a question."""
    row = np.arange(rows)
    kinds = [RIGHT, PARTLY, WRONG, MUTE] * (rows // LEAVES)
    return pd.DataFrame(
        {
            "iteration": row // 12,
            "question": [f"q{number // LEAVES % 3}" for number in row],
            "kind": "sum",
            "leaf": row % LEAVES,
            "scorer": "f1",
            **{name: [leaf[name] for leaf in kinds] for name in RIGHT},
        }
    )


def keys_of(table):
    return pd.MultiIndex.from_frame(table[["iteration", "question", "leaf"]])


def parts_of(table, wrong):
    """One part of each reward: the format's where it is broken, else the answer's."""
    given = zip(table["reward"], table["answer"], strict=True)
    parts = [
        "format" if not isinstance(answer, str) or (reward < 0 and reward != wrong) else "answer"
        for reward, answer in given
    ]
    return table[list(rewards.LEAF)].assign(part=parts, value=table["reward"])


def suited(table, broken_format=-1.0, wrong=0.0, leaves=None, parts=None):
    leaves = keys_of(good() if leaves is None else leaves)
    suite = rewards.expectations(**LIMITS, rows=len(leaves))
    parts = parts_of(table, wrong) if parts is None else parts
    return rewards.prepare(table, leaves, parts, broken_format, ["answer", "format"]), suite


@pytest.fixture
def check(judge):
    return lambda *given, **more: judge("rewards", *suited(*given, **more))


def row(number, **value):
    """How the row with this number is named."""
    question = f"q{number // LEAVES % 3}"
    return {"iteration": number // 12, "question": question, "leaf": number % LEAVES, **value}


def test_good_table_passes(check):
    assert check(good().sample(frac=1, random_state=0)) == {}


def test_table_from_parquet_passes(check, tmp_path):
    table = good()
    pairs = [dict(each or {}) for each in table["breakdown"]]
    breakdown = pa.array([list(each.items()) for each in pairs], pa.map_(pa.string(), pa.float64()))
    columns = pa.Table.from_pandas(table.drop(columns="breakdown"))
    pq.write_table(columns.append_column("breakdown", breakdown), tmp_path / "rewards.parquet")
    assert check(pd.read_parquet(tmp_path / "rewards.parquet")) == {}


@pytest.mark.parametrize(
    ("leaf", "planted", "words", "shown"),
    [
        (0, {"reward": np.nan}, PRESENT, {"unusable": "reward=nan"}),
        (0, {"score": np.inf}, PRESENT, {"unusable": "score=inf"}),
        (0, {"kind": None}, PRESENT, {"unusable": "kind=nan"}),
        (0, {"faults": None}, PRESENT, {"unusable": "faults=None"}),
        (0, {"outcome": "lost"}, "the outcome is known", {"outcome": "lost"}),
        (0, {"scorer": "taste"}, "the scorer is known", {"scorer": "taste"}),
        (0, {"reward": 1.2}, RANGE, {"reward": 1.2}),
        (0, {"reward": -1.5}, RANGE, {"reward": -1.5}),
        (1, {"score": 1.5}, "the score is in [0, 1]", {"score": 1.5}),
        (3, {"reward": 0.0}, BROKEN, {"broken_fault": "reward 0.0 in spite of no answer"}),
        (
            1,
            {"faults": ["think", "boxed"]},
            BROKEN,
            {"broken_fault": "reward 0.5 in spite of faults think, boxed"},
        ),
        (
            2,
            {"reward": -1.0},
            BROKEN,
            {"broken_fault": "reward -1.0 with an answer and a sound format"},
        ),
        (1, {"success": True}, SUCCESS, {"success_fault": "success with score 0.5"}),
        (3, {"success": True}, SUCCESS, {"success_fault": "success in spite of no answer"}),
        (
            0,
            {"faults": ["think"], "reward": -1.0},
            SUCCESS,
            {"success_fault": "success in spite of faults think"},
        ),
        (0, {"breakdown": None}, BREAKDOWN, {"breakdown_fault": "no breakdown"}),
        (0, {"breakdown": {}}, BREAKDOWN, {"breakdown_fault": "no score among nothing"}),
        (
            0,
            {"breakdown": {"f1": 1.0}},
            BREAKDOWN,
            {"breakdown_fault": "no score among f1"},
        ),
        (
            0,
            {"breakdown": {"score": np.nan}},
            BREAKDOWN,
            {"breakdown_fault": "score is nan"},
        ),
        (
            0,
            {"breakdown": {"score": 0.5}},
            BREAKDOWN,
            {"breakdown_fault": "score 0.5 there and 1.0 in the row"},
        ),
    ],
)
def test_planted_fault_is_named(leaf, planted, words, shown):
    table = good().astype(object)
    for column, value in planted.items():
        table.at[12 + leaf, column] = value
    found = broken(*suited(table.infer_objects()))
    assert found[words] == [row(12 + leaf, **shown)]
    assert all(
        rows == [row(12 + leaf, **dict([list(rows[0].items())[-1]]))] for rows in found.values()
    )


def test_leaf_without_a_reward_is_refused(check):
    assert check(good().drop(index=23)) == {
        "there are 24 rows, one a leaf": 23,
        "a question has 4 leaves an iteration": [
            row(number, group_size=3) for number in (20, 21, 22)
        ],
    }


def test_reward_of_another_tree_is_named(check):
    table = good()
    table.loc[8:11, "question"] = "q7"
    [*rows] = check(table)["the leaf is one of the trees'"]
    assert rows == [{**row(n), "question": "q7", "of_a_tree": False} for n in (8, 9, 10, 11)]


def test_broken_format_may_earn_a_wrong_answers_reward(check):
    table = good()
    table.loc[table["reward"] == 0, "reward"] = -1.0
    assert check(table, wrong=-1.0) == {}
    assert set(check(table)) == {BROKEN}


def test_parts_that_do_not_add_up_to_the_reward_are_named(check):
    table = good()
    parts = parts_of(table, 0.0)
    parts.loc[0, "value"] = 0.5
    assert check(table, parts=parts) == {ADD_UP: [row(0, parts_off_by=0.5)]}
    assert ADD_UP in check(table, parts=parts.drop(index=0))


def test_without_the_part_format_a_fault_and_a_missing_answer_may_earn_anything(check):
    table = good().assign(faults=[["think"]] * 24)
    assert check(table, broken_format=None) == {}
    assert set(check(table)) == {BROKEN, SUCCESS}


def test_an_episode_of_a_world_needs_no_answer(check):
    episode = {"answer": None, "breakdown": {"score": 1.0}, "scorer": "world"}
    table = good().astype(object)
    for column, value in episode.items():
        table.at[0, column] = value
    parts = parts_of(good(), 0.0)
    assert check(table.infer_objects(), parts=parts) == {}


def test_a_leaf_without_the_estimate_that_others_have_is_named(check):
    assert check(good().assign(estimate=0.5)) == {}
    table = good().assign(estimate=[None] + [0.5] * 23)
    said = "estimates are in [0, 1], of all leaves or of none"
    assert list(check(table)) == [said]


def test_no_rewards_are_refused(check):
    found = check(good().iloc[:0], leaves=good().iloc[:0])
    assert found == {"there are rewards": 0}


def test_large_clean_table_passes(check):
    assert check(good(20_000), leaves=good(20_000)) == {}

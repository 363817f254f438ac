"""The advantages' gate: a good table passes, each planted fault is named."""

import numpy as np
import pandas as pd
import pytest

from tasks.gates import advantages
from tasks.learning.estimators.group import relative
from tests.tasks.gates.conftest import broken

LEAVES = 4
PRESENT = "every value is present and finite, names are printable"
MEAN = "a group's advantages have mean 0"
EVEN = "where a group's rewards are equal, none has credit"


def good(rows=24):
    """Iterations of three questions each, four leaves a question; the last group without spread."""
    row = np.arange(rows)
    rewards = np.where(row % 3 == 0, 1.1, row % LEAVES / 7)
    rewards[-LEAVES:] = 0.1 + 0.2
    groups = rewards.reshape(-1, LEAVES)
    return pd.DataFrame(
        {
            "iteration": row // 12,
            "question": [f"q{number // LEAVES % 3}" for number in row],
            "leaf": row % LEAVES,
            "reward": rewards,
            "advantage": relative(rewards, np.repeat(np.arange(len(groups)), LEAVES), std=True),
        }
    )


def suited(table, rewards=None, centred=True):
    rewards = good() if rewards is None else rewards
    suite = advantages.expectations(rows=len(rewards), leaves=LEAVES, centred=centred)
    return advantages.prepare(table, rewards), suite


@pytest.fixture
def check(judge):
    return lambda *given, **more: judge("advantages", *suited(*given, **more))


def row(number, **value):
    """How the row with this number is named."""
    question = f"q{number // LEAVES % 3}"
    return {"iteration": number // 12, "question": question, "leaf": number % LEAVES, **value}


def test_good_table_passes(check):
    assert check(good().sample(frac=1, random_state=0)) == {}


@pytest.mark.parametrize(
    ("place", "column", "value", "words", "shown"),
    [
        (5, "advantage", np.nan, PRESENT, {"unusable": "advantage=nan"}),
        (5, "advantage", -np.inf, PRESENT, {"unusable": "advantage=-inf"}),
        (5, "question", "\x1b", PRESENT, {"question": "\\x1b", "unusable": "question=\\x1b"}),
        (22, "advantage", 1e-9, EVEN, {"of_equal_rewards": 1e-9}),
        (5, "question", "q9", "the leaf has a reward", {"question": "q9", "rewarded": False}),
    ],
)
def test_planted_fault_is_named(place, column, value, words, shown):
    table = good()
    table.loc[place, column] = value
    assert broken(*suited(table))[words] == [row(place, **shown)]


def test_group_off_its_mean_is_named(check):
    table = good()
    table.loc[:3, "advantage"] += 0.01
    found = check(table)
    assert set(found) == {MEAN}
    assert [each["group_mean"] for each in found[MEAN]] == pytest.approx([0.01] * 4)
    assert [each["leaf"] for each in found[MEAN]] == [0, 1, 2, 3]


def test_uncentred_estimators_are_not_checked(check):
    assert check(good().assign(advantage=good()["reward"]), centred=False) == {}
    assert set(check(good().assign(advantage=good()["reward"]))) == {MEAN, EVEN}


def test_reward_without_an_advantage_is_refused(check):
    found = check(good().drop(index=3))
    assert found.pop("there are 24 rows, one a reward") == 23
    assert found.pop("a question has 4 leaves an iteration") == [
        row(number, group_size=3) for number in (0, 1, 2)
    ]
    assert set(found) == {MEAN}


def test_leaf_twice_is_named(check):
    table = good()
    table.loc[1, "leaf"] = 2
    words = "a group's leaves are numbered from 0 on, each once"
    assert [each["leaf_off_by"] for each in check(table)[words]] == [1]


def test_no_advantages_are_refused(check):
    found = check(good().iloc[:0], rewards=good().iloc[:0])
    assert found == {"there are advantages": 0}


def test_large_clean_table_passes(check):
    assert check(good(20_000), rewards=good(20_000)) == {}

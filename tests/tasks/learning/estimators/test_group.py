from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.learning.estimators.group import (
    mean_by_key,
    relative,
)
from tests.tasks.learning.estimators.conftest import (
    HALF,
    assert_same,
    batches,
    episode,
    estimator,
    on_every_token,
    slow_relative,
    slow_whitened,
    slow_whole,
)


def advantages(credit, rewards):
    """One group of one-token outputs."""
    return np.concatenate(credit([[episode(reward) for reward in rewards]])[0])


def test_golden_values_of_group_relative():
    some = advantages(estimator("group_relative", std=True), [1.0, 0.0, 0.0, 1.0])
    np.testing.assert_allclose(some, [HALF, -HALF, -HALF, HALF], atol=1e-5)
    # mean 0, sample standard deviation 1
    some = advantages(estimator("group_relative", std=True), [-1.0, 0.0, 1.0])
    np.testing.assert_allclose(some, [-1, 0, 1], atol=2e-6)


def test_golden_values_without_the_standard_deviation():
    some = advantages(estimator("group_relative", std=False), [1.0, 0.0, 0.0, 2.0])
    np.testing.assert_allclose(some, [0.25, -0.75, -0.75, 1.25], atol=1e-12)


def test_golden_values_of_leave_one_out():
    # the others of the first: (0 + 0 + 2) / 3, of the second: (1 + 0 + 2) / 3, ...
    some = advantages(estimator("leave_one_out"), [1.0, 0.0, 0.0, 2.0])
    np.testing.assert_allclose(some, [1 / 3, -1, -1, 5 / 3], atol=1e-12)


def test_golden_values_of_batch_whitened():
    # returns 0.9 and 1.0 of the first leaf, 0 of the second: mean 1.9/3, std .5507571
    leaves = [episode(1.0, 2, token_rewards=np.array([-0.1, 0.0])), episode(0.0)]
    first, second = estimator("batch_whitened", baseline=False)([leaves])[0]
    np.testing.assert_allclose(first, [0.484182, 0.665750], atol=1e-5)
    np.testing.assert_allclose(second, [-1.149932], atol=1e-5)


def test_golden_values_of_batch_whitened_with_baseline():
    # whole rewards .9 and 0, mean .45: [.45, .55] and [-.45]; the other group's are 0
    leaves = [episode(1.0, 2, token_rewards=np.array([-0.1, 0.0])), episode(0.0)]
    some, others = estimator("batch_whitened", baseline=True)(
        [leaves, [episode(7.0), episode(7.0)]]
    )
    mean, std = 0.55 / 5, np.std([0.45, 0.55, -0.45, 0, 0], ddof=1)
    np.testing.assert_allclose(some[0], (np.array([0.45, 0.55]) - mean) / std, atol=1e-5)
    np.testing.assert_allclose(some[1], [(-0.45 - mean) / std], atol=1e-5)
    np.testing.assert_allclose(np.concatenate(others), [-mean / std] * 2, atol=1e-5)


@given(batches)
def test_returns_are_the_whole_reward_on_every_token(batch):
    expected = [on_every_token([slow_whole(leaf) for leaf in group], group) for group in batch]
    assert_same(estimator("return")(batch), expected)


@pytest.mark.parametrize("std", [True, False])
@given(batch=batches)
def test_group_relative_equals_a_slow_loop(std, batch):
    expected = [
        on_every_token(slow_relative([slow_whole(leaf) for leaf in group], std), group)
        for group in batch
    ]
    assert_same(estimator("group_relative", std=std)(batch), expected)


@given(batches)
def test_leave_one_out_is_a_slow_loop_over_its_formula(batch):
    expected = []
    for group in batch:
        wholes = [slow_whole(leaf) for leaf in group]
        others = [wholes[:i] + wholes[i + 1 :] for i in range(len(wholes))]
        per_leaf = [
            whole - sum(rest) / len(rest) if rest else 0.0
            for whole, rest in zip(wholes, others, strict=True)
        ]
        expected.append(on_every_token(per_leaf, group))
    assert_same(estimator("leave_one_out")(batch), expected)


@pytest.mark.parametrize("baseline", [True, False])
@given(batch=batches)
def test_batch_whitened_equals_a_slow_loop(baseline, batch):
    expected = []
    for group in batch:
        mean = sum(map(slow_whole, group)) / len(group) if baseline else 0.0
        expected.append(
            [
                [
                    leaf.reward + sum(leaf.token_rewards[t:].tolist()) - mean
                    for t in range(len(leaf.tokens))
                ]
                for leaf in group
            ]
        )
    assert_same(estimator("batch_whitened", baseline=baseline)(batch), slow_whitened(expected))


def test_whitening_counts_shared_tokens_by_leaf():
    shared = [replace(episode(1.0, 3), tokens=np.arange(3))] * 2
    apart = [episode(1.0, 3), replace(episode(1.0, 3), tokens=np.arange(3) + 10)]
    other = [episode(0.0)]
    credit = estimator("batch_whitened", baseline=False)
    assert_same(credit([shared, other]), credit([apart, other]), tolerance=0)


def test_groups_of_equal_rewards_are_exactly_zero():
    batch = [[episode(value, length) for length in (1, 2, 4)] for value in (0.1, 1 / 3, 0.7)]
    some = estimator("batch_whitened", baseline=True)(batch)
    assert all((leaf == 0).all() for group in some for leaf in group)


ENTRIES = st.lists(st.tuples(st.integers(-3, 3), st.floats(-10, 10)), max_size=30)


@given(ENTRIES)
def test_means_by_key_are_those_of_a_slow_loop(entries):
    keys, values = [key for key, _ in entries], [value for _, value in entries]
    alike = [[v for k, v in entries if k == key] for key in keys]
    some = mean_by_key(np.array(values, np.float64), np.array(keys, np.int64))
    np.testing.assert_allclose(some, [sum(vs) / len(vs) for vs in alike], atol=1e-12)


@given(st.floats(-1e12, 1e12), st.integers(1, 40))
def test_the_mean_of_equal_values_is_that_value(value, count):
    assert (mean_by_key(np.full(count, value), np.zeros(count, np.int64)) == value).all()


@pytest.mark.parametrize("std", [True, False])
def test_equal_entries_of_a_key_are_exactly_zero(std):
    values, keys = np.array([0.1, 0.3, 0.3, 0.3, 5.0, 7.0]), np.array([4, 1, 1, 1, 9, 9])
    some = relative(values, keys, std)
    assert some[:4].tolist() == [0.0] * 4
    assert some[4] < 0 < some[5]

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


def test_golden_values_of_mean_relative():
    some = advantages(estimator("mean_relative"), [1.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(some, [3, -1, -1, -1], atol=2e-5)  # mean .25
    assert advantages(estimator("mean_relative"), [-1.0, -1.0]).tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"mean -0\.5, .* format\.broken .* group_relative"):
        advantages(estimator("mean_relative"), [-1.0, 0.0])


@given(st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=1, max_size=6))
def test_mean_relative_equals_a_slow_loop(rewards):
    mean = sum(rewards) / len(rewards)
    expected = [(r - mean) / (mean + 1e-6) if len({*rewards}) > 1 else 0.0 for r in rewards]
    np.testing.assert_allclose(advantages(estimator("mean_relative"), rewards), expected, atol=1e-9)


def test_golden_values_of_part_relative():
    """The large part does not drown the small one, and each group is compared with itself."""
    parts = [{"a": 100.0, "b": 0.0}, {"a": 0.0, "b": 0.1}], [{"a": 1.0, "b": 0.0}] * 2
    batch = [[episode(0.0, 2, parts=one) for one in group] for group in parts]
    some, others = estimator("part_relative")(batch)
    assert abs(some[0][0] - some[1][0]) < 20, "what is left of 1 / 2^.5 - 1 / 2^.5 is the epsilons'"
    some, others = estimator("part_relative", weights={"a": 3.0})(batch)
    # sums 2 / 2^.5 and -2 / 2^.5, and 0, 0: standard deviation (2 * 2 / 3)^.5
    half = 2**0.5 / (4 / 3) ** 0.5
    np.testing.assert_allclose(np.concatenate(some), [half, half, -half, -half], atol=1e-4)
    np.testing.assert_allclose(np.concatenate(others), 0, atol=1e-12)


@given(st.randoms(use_true_random=False))
def test_part_relative_equals_a_slow_loop(random):
    names = ["answer", "format", "style"]
    weights = {"format": random.choice([0.5, 2.0])}
    batch = [
        [
            episode(0.0, 3, parts={name: random.choice([0.0, 0.1, 1.0]) for name in names})
            for _ in range(random.randrange(1, 5))
        ]
        for _ in range(random.randrange(1, 4))
    ]
    sums = []
    for group in batch:
        of_parts = [
            [
                weights.get(name, 1.0) * x
                for x in slow_relative([leaf.parts[name] for leaf in group])
            ]
            for name in names
        ]
        sums.append([[sum(values)] for values in zip(*of_parts, strict=True)])
    expected = [
        on_every_token([value for (value,) in of_group], group)
        for of_group, group in zip(slow_whitened(sums), batch, strict=True)
    ]
    assert_same(estimator("part_relative", weights=weights)(batch), expected, tolerance=1e-6)


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

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tasks.estimators.group import group_relative

REWARDS = st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, 1.1])
groups = st.integers(1, 16).flatmap(lambda n: arrays(np.float64, n, elements=REWARDS))


def test_golden_values():
    advantages = group_relative(np.array([1.0, 0.0, 0.0, 1.0]))
    half = 0.75**0.5  # 0.8660
    np.testing.assert_allclose(advantages, [half, -half, -half, half], atol=1e-5)


def test_golden_values_of_three_rewards():
    # mean 0, sample standard deviation 1
    np.testing.assert_allclose(group_relative(np.array([-1.0, 0.0, 1.0])), [-1, 0, 1], atol=2e-6)


@pytest.mark.parametrize("value", [-1.0, 0.0, 0.1, 1 / 3, 1e9])
@pytest.mark.parametrize("size", [1, 2, 7, 16])
def test_a_group_without_spread_gives_exactly_zero(value, size):
    assert (group_relative(np.full(size, value)) == 0).all()


def test_one_member_gives_exactly_zero():
    assert group_relative(np.array([1.1])).tolist() == [0.0]


@given(groups)
def test_advantages_are_those_of_the_formula(rewards):
    advantages = group_relative(rewards)
    assert advantages.shape == rewards.shape
    assert np.isfinite(advantages).all()
    assume(len(set(rewards)) > 1)
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
    np.testing.assert_allclose(advantages, [(r - mean) / (std + 1e-6) for r in rewards], atol=1e-9)


@given(groups, st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_matter(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    np.testing.assert_allclose(
        group_relative(rewards[order]), group_relative(rewards)[order], atol=1e-9
    )


@given(groups, st.sampled_from([-3.0, -0.5, 0.25, 2.0, 8.0]))
def test_a_shift_of_all_rewards_does_not_matter(rewards, shift):
    np.testing.assert_allclose(group_relative(rewards + shift), group_relative(rewards), atol=1e-7)


@given(groups)
def test_rewards_are_left_as_they_were(rewards):
    before = rewards.copy()
    group_relative(rewards)
    assert (rewards == before).all()

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.learning.estimators.critic import (
    discounted_sums,
    explained_variance,
    token_advantages,
    value_targets,
)
from tests.tasks.learning.estimators.conftest import (
    assert_same,
    batches,
    episode,
    factors,
    gae,
    slow_whitened,
)


def slow_gae(leaf, gamma, lambda_):
    """A_t = sum over k of (gamma lambda)^k delta_{t+k}, written out."""
    length, values = len(leaf.tokens), leaf.values.tolist()
    rewards = [r + leaf.reward * (t == length - 1) for t, r in enumerate(leaf.token_rewards)]
    deltas = [
        rewards[t] + gamma * (values[t + 1] if t + 1 < length else 0.0) - values[t]
        for t in range(length)
    ]
    return [
        sum((gamma * lambda_) ** (u - t) * deltas[u] for u in range(t, length))
        for t in range(length)
    ]


def test_golden_values():
    # deltas: -.1 + .5 * .4 - .2 = -.1; .5 * .6 - .4 = -.1; 1 - .6 = .4
    leaf = episode(
        1.0, 3, token_rewards=np.array([-0.1, 0.0, 0.0]), values=np.array([0.2, 0.4, 0.6])
    )
    # gamma lambda = .25: .4; -.1 + .1 = 0; -.1 + 0 = -.1
    assert_same(token_advantages([[leaf]], 0.5, 0.5), [[[-0.1, 0.0, 0.4]]])
    assert_same(value_targets([[leaf]], 0.5, 0.5), [[[0.1, 0.4, 1.0]]])
    std = np.std([-0.1, 0.0, 0.4], ddof=1)
    assert_same(gae(0.5, 0.5)([[leaf]]), [[np.array([-0.2, -0.1, 0.3]) / std]], tolerance=1e-5)


@given(batches, factors, factors)
def test_gae_is_a_slow_loop_over_its_formula(batch, gamma, lambda_):
    expected = [[slow_gae(leaf, gamma, lambda_) for leaf in group] for group in batch]
    assert_same(token_advantages(batch, gamma, lambda_), expected)
    assert_same(gae(gamma, lambda_)(batch), slow_whitened(expected))
    targets = [
        [np.array(A) + leaf.values for A, leaf in zip(leaves, group, strict=True)]
        for leaves, group in zip(expected, batch, strict=True)
    ]
    assert_same(value_targets(batch, gamma, lambda_), targets)


@given(batches, factors)
def test_targets_with_lambda_1(batch, gamma):
    for group, targets in zip(batch, value_targets(batch, gamma, 1.0), strict=True):
        for leaf, some in zip(group, targets, strict=True):
            rewards = leaf.token_rewards.copy()
            rewards[-1] += leaf.reward
            expected = [
                sum(gamma**u * r for u, r in enumerate(rewards[t:])) for t in range(len(rewards))
            ]
            np.testing.assert_allclose(some, expected, atol=1e-12)


@given(batches, factors)
def test_targets_with_lambda_0(batch, gamma):
    for group, targets in zip(batch, value_targets(batch, gamma, 0.0), strict=True):
        for leaf, some in zip(group, targets, strict=True):
            ahead = [*(leaf.token_rewards[:-1] + gamma * leaf.values[1:])]
            expected = [*ahead, leaf.token_rewards[-1] + leaf.reward]
            np.testing.assert_allclose(some, expected, atol=1e-12)


@given(batches)
def test_perfect_critic_leaves_no_advantage(batch):
    targets = value_targets(batch, 1.0, 1.0)
    knowing = [
        [replace(leaf, values=V) for leaf, V in zip(group, values, strict=True)]
        for group, values in zip(batch, targets, strict=True)
    ]
    zeros = [[np.zeros(len(leaf.tokens)) for leaf in group] for group in batch]
    assert_same(token_advantages(knowing, 1.0, 0.95), zeros)


@pytest.mark.parametrize("ask", [lambda batch: gae(1, 1)(batch), lambda b: value_targets(b, 1, 1)])
@pytest.mark.parametrize(("values", "count"), [(None, 0), (np.zeros(2), 2)])
def test_an_episode_without_its_values_is_refused(ask, values, count):
    good, bad = episode(1.0, 3, values=np.zeros(3)), episode(1.0, 3, values=values)
    with pytest.raises(ValueError, match=f"leaf 1 of a group has {count} values for 3 sampled"):
        ask([[good, bad]])


@given(st.lists(st.lists(st.floats(-5, 5), max_size=6), max_size=5), factors)
def test_discounted_sums_are_those_of_a_slow_loop(arrays, factor):
    some = discounted_sums([np.array(array, np.float64) for array in arrays], factor)
    expected = [
        [sum(factor**u * x for u, x in enumerate(array[t:])) for t in range(len(array))]
        for array in arrays
    ]
    assert_same([some], [expected], tolerance=1e-12)


def test_explained_variance_of_good_and_bad_critics():
    targets = np.array([[1.0, 2.0], [3.0, 6.0]])
    assert explained_variance(targets, targets) == 1.0
    assert explained_variance(targets + 5, targets) == 1.0  # a shift is bias, not variance
    assert explained_variance(np.full_like(targets, 9.0), targets) == 0.0
    assert explained_variance(-targets, targets) == pytest.approx(-3.0)
    assert explained_variance(targets / 2, targets) == pytest.approx(0.75)


def test_explained_variance_of_equal_targets_is_0():
    assert explained_variance(np.array([1.0, 2.0, 3.0]), np.full(3, 0.1)) == 0.0
    assert explained_variance(np.zeros(0), np.zeros(0)) == 0.0

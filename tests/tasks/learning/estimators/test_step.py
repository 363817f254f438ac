from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.learning.estimators.step import (
    state_group_sizes,
    state_sharing,
    step_advantages,
    step_rewards,
)
from tests.tasks.learning.estimators.conftest import (
    HALF,
    assert_same,
    batches,
    episode,
    estimator,
    factors,
    gae,
    groups,
    slow_relative,
    slow_whitened,
    slow_whole,
    walk,
)

FOUR = [
    walk(states, [0.0, 0.0, 0.0], final)
    for states, final in (("ABC", 10.0), ("ABD", 0.0), ("AEC", 10.0), ("AEE", 0.0))
]


def two_level(omega, gamma, std=True):
    return estimator("two_level", omega=omega, gamma=gamma, std=std)


def grouped_gae(gamma, lambda_, **settings):
    return gae(gamma, lambda_, "grouped_gae", **settings)


def slow_rewards(leaf):
    """A step's reward, looked up token by token."""
    rewards = []
    for t in range(len(leaf.states)):
        charges = zip(leaf.steps, leaf.token_rewards, strict=True)
        rewards.append(sum(charge for step, charge in charges if step == t))
    rewards[-1] += leaf.reward
    return rewards


def slow_returns(leaf, gamma):
    rewards = slow_rewards(leaf)
    return [sum(gamma**u * r for u, r in enumerate(rewards[t:])) for t in range(len(rewards))]


def by_state(group, gamma):
    """state -> the returns of every occurrence."""
    returns: dict[str, list[float]] = {}
    for leaf in group:
        for state, some in zip(leaf.states, slow_returns(leaf, gamma), strict=True):
            returns.setdefault(state, []).append(some)
    return returns


def slow_deltas(group, gamma):
    values = {state: sum(some) / len(some) for state, some in by_state(group, gamma).items()}
    deltas = []
    for leaf in group:
        V = [*(values[state] for state in leaf.states), 0.0]
        rewards = slow_rewards(leaf)
        deltas.append([r + gamma * V[t + 1] - V[t] for t, r in enumerate(rewards)])
    return deltas


def slow_step_advantages(group, gamma, lambda_):
    return [
        [
            sum((gamma * lambda_) ** u * delta for u, delta in enumerate(deltas[t:]))
            for t in range(len(deltas))
        ]
        for deltas in slow_deltas(group, gamma)
    ]


def on_tokens(per_step, group):
    return [[steps[t] for t in leaf.steps] for steps, leaf in zip(per_step, group, strict=True)]


GOLDEN = [
    [3.61, 4.75, 0.0],
    [-3.61, -4.75, 0.0],
    [3.309167, 6.333333, 0.0],
    [-3.453567, -2.565, -3.166667],
]


def test_golden_values_of_grouped_gae():
    expected = GOLDEN
    some = step_advantages(FOUR, 0.95, 0.8)
    assert_same([some], [expected], tolerance=1e-5)
    flat = np.concatenate(some)
    np.testing.assert_allclose([flat.mean(), flat.std(ddof=1)], [0.0381056, 3.7021811], atol=1e-5)
    standardised = [(np.array(steps) - 0.0381056) / 3.7021811 for steps in expected]
    assert_same(grouped_gae(0.95, 0.8)([FOUR]), [standardised], tolerance=1e-5)


ABLATIONS = {  # of GAGPO, its table 2: other choices, and its credit before normalisation
    "lambda 0": (
        {"lambda_": 0.0},
        [[0, 4.75, 0], [0, -4.75, 0], [-1.504167, 6.333333, 0], [-1.504167, -0.158333, -3.166667]],
    ),
    "Monte Carlo": (
        {"lambda_": 1.0},
        [
            [4.5125, 4.75, 0],
            [-4.5125, -4.75, 0],
            [4.5125, 6.333333, 0],
            [-4.5125] + [-3.166667] * 2,
        ],
    ),
    "episode term": ({"omega": 0.5}, None),
    "over the batch": ({"normalisation": "batch"}, None),
    "not normalised": ({"normalisation": "none"}, None),
}
SHORT = ([0.5], [-0.5])  # credit of a second group: two episodes of one step, rewards 1 and 0


@pytest.mark.parametrize(("changes", "raw"), ABLATIONS.values(), ids=ABLATIONS)
def test_golden_values_of_the_ablations(changes, raw):
    raw = raw or GOLDEN
    credit = grouped_gae(**{"gamma": 0.95, "lambda_": 0.8, **changes})
    found = credit([FOUR, [walk("A", [1.0]), walk("A", [0.0])]])
    expected = {
        "group": [slow_whitened([raw])[0], slow_whitened([SHORT])[0]],
        "batch": slow_whitened([raw, SHORT]),
        "none": [raw, SHORT],
    }[changes.get("normalisation", "group")]
    omega = changes.get("omega", 0.0)
    terms = [[HALF, -HALF, HALF, -HALF], [0.5**0.5, -(0.5**0.5)]]  # group-relative 10, 0, 10, 0
    expected = [
        [[a + omega * term for a in leaf] for leaf, term in zip(group, of_group, strict=True)]
        for group, of_group in zip(expected, terms, strict=True)
    ]
    assert_same(found, expected, tolerance=1e-5)


def test_golden_values_of_a_states_mean_return():
    # With lambda 1 the advantage is the return less the mean return of the state.
    expected = {"A": 4.5125, "B": 4.75, "C": 10.0, "D": 0.0, "E": 3.166667}
    for leaf, some in zip(FOUR, step_advantages(FOUR, 0.95, 1.0), strict=True):
        values = np.array(slow_returns(leaf, 0.95)) - some
        np.testing.assert_allclose(values, [expected[state] for state in leaf.states], atol=1e-5)


def test_golden_values_of_two_level():
    # Returns of A .9025 times 10, 0, 10, 0; of B 9.5, 0; of C 10, 10; D alone; E 9.5, 0, 0.
    pair, three = 0.5**0.5, 2 / 3**0.5  # (1 - 1/2) / .7071 and (9.5 - 3.1667) / 5.4848
    steps = [
        [HALF, pair, 0.0],
        [-HALF, -pair, 0.0],
        [HALF, three, 0.0],
        [-HALF, -three / 2, -three / 2],
    ]
    episodes = [HALF, -HALF, HALF, -HALF]
    expected = [
        [0.5 * some + whole for some in leaf] for leaf, whole in zip(steps, episodes, strict=True)
    ]
    assert_same(two_level(0.5, 0.95, True)([FOUR]), [expected], tolerance=1e-5)


def test_golden_values_of_two_level_without_std():
    e = 9.5 / 3
    steps = [[4.5125, 4.75, 0], [-4.5125, -4.75, 0], [4.5125, 9.5 - e, 0], [-4.5125, -e, -e]]
    expected = [
        [some + whole for some in leaf]
        for leaf, whole in zip(steps, [5.0, -5.0, 5.0, -5.0], strict=True)
    ]
    assert_same(two_level(1.0, 0.95, False)([FOUR]), [expected], tolerance=1e-5)


@pytest.mark.parametrize("std", [True, False])
@given(batch=batches, gamma=factors, omega=st.sampled_from([0.0, 0.5, 1.0]))
def test_two_level_is_a_slow_loop_over_its_formula(std, batch, gamma, omega):
    expected = []
    for group in batch:
        relative = {}  # state -> advantage of each occurrence, in turn
        for state, returns in by_state(group, gamma).items():
            relative[state] = iter(slow_relative(returns, std))
        episodes = slow_relative([slow_whole(leaf) for leaf in group], std)
        per_step = [
            [whole + omega * next(relative[state]) for state in leaf.states]
            for whole, leaf in zip(episodes, group, strict=True)
        ]
        expected.append(on_tokens(per_step, group))
    assert_same(two_level(omega, gamma, std)(batch), expected)


@pytest.mark.parametrize("normalisation", ["group", "batch", "none"])
@given(batch=batches, gamma=factors, lambda_=factors, omega=st.sampled_from([0.0, 0.5]))
def test_grouped_gae_is_a_slow_loop_over_its_formula(normalisation, batch, gamma, lambda_, omega):
    slow = [slow_step_advantages(group, gamma, lambda_) for group in batch]
    for group, expected in zip(batch, slow, strict=True):
        assert_same([step_advantages(group, gamma, lambda_)], [expected])
    normalised = {
        "group": lambda: [slow_whitened([steps])[0] for steps in slow],
        "batch": lambda: slow_whitened(slow),
        "none": lambda: slow,
    }[normalisation]()
    expected = []
    for steps, group in zip(normalised, batch, strict=True):
        terms = slow_relative([slow_whole(leaf) for leaf in group])
        credit = [[a + omega * term for a in leaf] for leaf, term in zip(steps, terms, strict=True)]
        expected.append(on_tokens(credit, group))
    settings = {"normalisation": normalisation, "omega": omega}
    assert_same(grouped_gae(gamma, lambda_, **settings)(batch), expected, tolerance=1e-7)


@given(groups(), factors, factors)
def test_a_batch_of_one_group_is_normalised_as_the_group_is(group, gamma, lambda_):
    one, other = (grouped_gae(gamma, lambda_, normalisation=n)([group]) for n in ("batch", "group"))
    assert_same(one, other, tolerance=0)


@given(groups(), factors)
def test_grouped_gae_with_lambda_1(group, gamma):
    means = {state: sum(some) / len(some) for state, some in by_state(group, gamma).items()}
    expected = [
        [
            some - means[state]
            for state, some in zip(leaf.states, slow_returns(leaf, gamma), strict=True)
        ]
        for leaf in group
    ]
    assert_same([step_advantages(group, gamma, 1.0)], [expected])


@given(groups(), factors)
def test_grouped_gae_with_lambda_0(group, gamma):
    assert_same([step_advantages(group, gamma, 0.0)], [slow_deltas(group, gamma)])


@given(groups(), factors, factors)
def test_standardised_steps_have_mean_0_and_spread_1(group, gamma, lambda_):
    (advantages,) = grouped_gae(gamma, lambda_)([group])
    first_tokens = [np.unique(leaf.steps, return_index=True)[1] for leaf in group]
    steps = np.concatenate([a[t] for a, t in zip(advantages, first_tokens, strict=True)])
    assert abs(steps.mean()) < 1e-9
    if np.abs(steps).max() > 1e-6:
        assert abs(steps.std(ddof=1) - 1) < 1e-3


@given(groups(), factors, factors)
def test_unshared_states_get_no_step_credit(group, gamma, lambda_):
    apart = [
        replace(leaf, states=tuple(f"{i}, {t}" for t in range(len(leaf.states))))
        for i, leaf in enumerate(group)
    ]
    wholes = two_level(0.0, gamma, True)([apart])
    assert_same(two_level(1.0, gamma, True)([apart]), wholes, tolerance=0)
    zeros = [np.zeros(len(leaf.tokens)) for leaf in apart]
    assert_same(grouped_gae(gamma, lambda_)([apart]), [zeros], tolerance=0)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 10.0])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_equal_walks_give_exactly_zero(value, size):
    alike = [walk("ABC", [0.0, -0.1, 0.0], value)] * size
    for credit in (
        grouped_gae(0.95, 0.8),
        grouped_gae(0.95, 0.8, normalisation="none", omega=0.5),
        two_level(1.0, 0.95, True),
    ):
        assert (np.concatenate(credit([alike])[0]) == 0).all()


@given(groups(), factors, factors)
def test_tokens_of_a_step_do_not_matter(group, gamma, lambda_):
    one_token_each = [walk(leaf.states, slow_rewards(leaf)) for leaf in group]
    for credit in (
        two_level(1.0, gamma, True),
        grouped_gae(gamma, lambda_),
    ):
        some = credit([one_token_each])
        expected = [[a[leaf.steps] for a, leaf in zip(some[0], group, strict=True)]]
        assert_same(credit([group]), expected)


def test_step_reward_sums_its_tokens():
    charges, steps = np.array([0.0, -0.1, 0.0, -0.2, 0.5]), np.array([0, 0, 1, 1, 2])
    leaf = episode(10.0, 5, token_rewards=charges, steps=steps, states=("a", "b", "c"))
    np.testing.assert_allclose(step_rewards(leaf), [-0.1, -0.2, 10.5], atol=1e-12)


@pytest.mark.parametrize(
    "credit",
    [two_level(1.0, 0.95, True), grouped_gae(0.95, 0.8)],
)
def test_states_that_do_not_fit_the_steps_are_refused(credit):
    leaf = replace(walk("AB", [0.0, 0.0]), states=("A", "B", "C"))
    with pytest.raises(ValueError, match="2 environment steps and 3 states"):
        credit([[leaf]])


@given(groups(), factors, factors)
def test_a_history_is_a_state_of_its_own(group, gamma, lambda_):
    """As if each observation said all that the episode had shown."""
    telling = [
        replace(leaf, states=tuple("|".join(leaf.states[: t + 1]) for t in range(len(leaf.states))))
        for leaf in group
    ]
    for kind, settings in (
        ("two_level", {"omega": 1.0, "gamma": gamma}),
        ("grouped_gae", {"gamma": gamma, "lambda": lambda_}),
    ):
        found = estimator(kind, key="history", **settings)([group])
        assert_same(found, estimator(kind, **settings)([telling]), tolerance=0)
    assert state_sharing([group], "history") == state_sharing([telling])
    assert state_group_sizes([group], "history") == state_group_sizes([telling])


def test_a_history_tells_equal_observations_apart():
    """ABC and AEC end in an equal observation, after different ones."""
    assert state_sharing([FOUR])["mean_state_group"] == 12 / 5
    assert state_sharing([FOUR], "history")["mean_state_group"] == 12 / 7


def test_state_sharing_counts_within_groups():
    # First group: A 4 times, B 2, C 2, D 1, E 3. Second: A and Z once each, though A was there.
    assert state_sharing([FOUR, [walk("AZ", [0.0, 0.0])]]) == {
        "singleton_share": 3 / 14,
        "mean_state_group": 14 / 7,
    }
    nine = walk("B" * 9, [0.0] * 9)
    sizes = state_group_sizes([FOUR, [walk("AZ", [0.0, 0.0]), nine], [walk("C" * 8, [0.0] * 8)]])
    assert sizes == {"1": 3, "2": 4, "3-4": 7, "5-8": 8, ">8": 9}
    assert state_group_sizes([]) == dict.fromkeys(sizes, 0)
    assert state_sharing([]) == {"singleton_share": 0.0, "mean_state_group": 0.0}
    assert state_sharing([[episode(1.0)]]) == {"singleton_share": 1.0, "mean_state_group": 1.0}

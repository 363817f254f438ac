"""Bootstrap intervals, of one agent and of two over the same questions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.trees.intervals import (
    bootstrap_interval,
    interval_over_seeds,
    paired_bootstrap,
    student_interval,
)


def test_an_interval_of_equal_values_is_that_value():
    for value in (0.0, 1.0, 0.3):
        low, high = bootstrap_interval(np.full(50, value), 100, seed=1)
        assert (low, high) == pytest.approx((value, value))


def test_interval_contains_its_mean():
    values = np.random.default_rng(0).random(60)
    low, high = bootstrap_interval(values, 500, seed=3)
    assert low < values.mean() < high
    assert bootstrap_interval(values, 500, seed=3) == (low, high)
    assert bootstrap_interval(values, 500, seed=4) != (low, high)


def test_width_of_an_interval():
    values = np.random.default_rng(0).normal(size=400)
    low, high = bootstrap_interval(values, 2000, seed=0)
    error = values.std(ddof=1) / 400**0.5
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.08)


def test_interval_over_seeds_covers_both_sources_of_chance():
    draw = np.random.default_rng(2)
    one = draw.random(400) < 0.6
    alone = interval_over_seeds(one[None].astype(float), 2000, seed=0)
    assert alone == pytest.approx(bootstrap_interval(one.astype(float), 2000, seed=5), abs=0.01)
    equal = interval_over_seeds(np.stack([one, one, one]).astype(float), 2000, seed=0)
    assert equal == pytest.approx(alone, abs=0.01), "the same questions, three times, are one exam"
    apart = np.stack([np.zeros(400), one, np.ones(400)]).astype(float)
    low, high = interval_over_seeds(apart, 2000, seed=0)
    assert high - low > 0.5, "seeds that differ widen it"
    assert interval_over_seeds(apart, 2000, seed=0) == (low, high)


@pytest.mark.parametrize("apart", [0.0, 0.02])
def test_intervals_over_seeds_cover_the_truth(apart):
    """Questions differ in difficulty, and every seed answers the same ones."""
    random, runs = np.random.default_rng(4), 300
    covered = 0
    for seed in range(runs):
        hard = 0.2 + 0.6 * random.random(150)
        ability = apart * random.normal(size=(5, 1))
        right = (random.random((5, 150)) < hard + ability).astype(float)
        low, high = interval_over_seeds(right, 200, seed)
        covered += low <= 0.5 <= high
    assert covered / runs > 0.93


@pytest.mark.parametrize("rate", [0.5, 0.8])
def test_intervals_cover_the_truth(rate):
    random = np.random.default_rng(11)
    runs = 400
    covered = 0
    for seed in range(runs):
        low, high = bootstrap_interval((random.random(100) < rate).astype(float), 300, seed)
        covered += low <= rate <= high
    assert 0.91 < covered / runs < 0.98


VALUES = st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=1, max_size=40)


@st.composite
def pairs(draw):
    """Two agents' values on the same questions."""
    first = draw(VALUES)
    size = len(first)
    second = draw(st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=size, max_size=size))
    return np.array(first), np.array(second)


def paired(candidate, other, confidence=0.9):
    return paired_bootstrap(candidate, other, confidence, 200)


def test_golden_paired_difference():
    candidate, other = np.array([1.0, 1, 1, 0, 1, 1, 0, 1]), np.array([0.0, 1, 0, 0, 1, 0, 1, 1])
    found = paired_bootstrap(candidate, other, 0.95, 1000)
    assert found.mean == 0.25  # three won, one lost, of eight
    # by hand, over the same resamples
    random = np.random.default_rng(0)
    won = np.sort(candidate - other)
    draws = random.integers(8, size=(1000, 8))
    means = sorted(np.mean([won[i] for i in draw]) for draw in draws)
    assert (found.low, found.high) == tuple(np.percentile(means, [2.5, 97.5]))
    assert (found.low, found.high) == (-0.25, 0.625)
    wins, ties = sum(mean > 0 for mean in means), sum(mean == 0 for mean in means)
    assert found.probability == pytest.approx((wins + ties / 2) / 1000)
    assert 0.75 < found.probability < 0.9


@given(pairs())
def test_swapped_agents_change_the_sign(pair):
    one, other = paired(*pair), paired(*reversed(pair))
    assert one.mean == pytest.approx(-other.mean)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))
    assert one.probability + other.probability == pytest.approx(1)


@given(pairs(), st.randoms())
def test_order_of_questions_changes_nothing(pair, random):
    order = list(range(len(pair[0])))
    random.shuffle(order)
    assert paired(*pair) == paired(pair[0][order], pair[1][order])


@given(pairs())
def test_interval_is_ordered_and_widens_with_confidence(pair):
    found, wider = paired(*pair), paired(*pair, confidence=0.99)
    assert -1 <= wider.low <= found.low <= found.high <= wider.high <= 1
    assert 0 <= found.probability <= 1


@given(VALUES)
def test_agent_equals_itself(values):
    found = paired(np.array(values), np.array(values))
    assert (found.mean, found.low, found.high, found.probability) == (0, 0, 0, 0.5)


@given(pairs(), st.floats(0.01, 1))
def test_common_gain_changes_nothing(pair, gain):
    found, moved = paired(*pair), paired(pair[0] + gain, pair[1] + gain)
    assert (moved.mean, moved.low, moved.high) == pytest.approx(
        (found.mean, found.low, found.high), abs=1e-9
    )


def test_pairing_removes_the_questions_difficulty():
    """Both fail the same half of the questions: unpaired, one point could not be seen."""
    other = np.tile([0.0, 1.0], 100)
    candidate = other.copy()
    candidate[:10:2] = 1  # five questions more
    found = paired_bootstrap(candidate, other, 0.95, 2000)
    assert found.low > 0
    assert found.probability > 0.98
    unpaired = bootstrap_interval(candidate, 2000, 0), bootstrap_interval(other, 2000, 0)
    assert unpaired[0][0] < unpaired[1][1]


def test_paired_intervals_cover_the_truth():
    random = np.random.default_rng(3)
    covered = 0
    for _ in range(300):
        hard = random.random(120)
        candidate, other = random.random(120) < hard, random.random(120) < hard * 0.8
        found = paired_bootstrap(candidate.astype(float), other.astype(float), 0.9, 300)
        covered += found.low <= 0.1 <= found.high
    assert 0.84 < covered / 300 < 0.95


@pytest.mark.parametrize(("one", "other"), [([], []), ([1.0], []), ([1.0, 0.0], [1.0])])
def test_unpaired_values_are_refused(one, other):
    with pytest.raises(ValueError, match="cannot be paired"):
        paired(np.array(one), np.array(other))


def test_golden_interval_by_students_distribution():
    # deviation 1.291, t of 3 degrees of freedom 3.182
    low, high = student_interval(np.array([1.0, 2.0, 3.0, 4.0]), 0.95)
    assert (low, high) == pytest.approx((0.4457, 4.5543), abs=1e-4)
    assert student_interval(np.array([1.0]), 0.95) == (-np.inf, np.inf)

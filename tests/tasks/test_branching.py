"""The branching rule, by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from params.schema import Rollout
from tasks.branching import branch_probability, wants_branch, window_entropy


def budget(draw: bool, threshold: float = 0.5) -> Rollout:
    return Rollout(
        leaves=16,
        initial=8,
        branch=2,
        entropy_window=20,
        base_probability=0.5,
        entropy_weight=0.2,
        threshold=threshold,
        draw=draw,
        temperature=1.0,
        rows=16,
    )


@pytest.mark.parametrize(
    ("window", "mean"), [(1, 0.25), (2, 0.5), (3, 0.5), (4, 0.375), (100, 0.375)]
)
def test_the_window_is_the_first_tokens_or_as_many_as_there_are(window, mean):
    assert window_entropy(np.array([0.25, 0.75, 0.5, 0.0], np.float32), window) == mean


def test_no_tokens_have_no_entropy():
    assert window_entropy(np.zeros(0, np.float32), 20) == 0.0


@pytest.mark.parametrize(
    ("initial", "entropy", "expected"), [(0.2, 0.2, 0.5), (0.0, 1.0, 0.7), (1.0, 0.0, 0.3)]
)
def test_probability_is_equation_3(initial, entropy, expected):
    assert branch_probability(initial, entropy, 0.5, 0.2) == pytest.approx(expected)


def test_probability_is_not_clipped():
    assert branch_probability(0.0, 1.0, 0.5, 3.0) == pytest.approx(3.5)
    assert branch_probability(1.0, 0.0, 0.5, 3.0) == pytest.approx(-2.5)


@given(probability=st.floats(-2, 3), threshold=st.floats(-1, 2), uniform=st.floats(0, 0.999))
def test_the_paper_branches_above_the_threshold_whatever_the_coin(probability, threshold, uniform):
    branches = wants_branch(probability, budget(draw=False, threshold=threshold), uniform)
    assert branches == (probability > threshold)


def test_at_the_threshold_there_is_no_branch():
    assert not wants_branch(0.5, budget(draw=False), 0.0)


@pytest.mark.parametrize(
    ("probability", "share"), [(-1.0, 0.0), (0.0, 0.0), (0.3, 0.3), (1.0, 1.0), (2.0, 1.0)]
)
def test_a_drawn_branch_comes_as_often_as_its_clipped_probability(probability, share):
    coins = (np.arange(1000) + 0.5) / 1000
    wishes = [wants_branch(probability, budget(draw=True), float(coin)) for coin in coins]
    assert np.mean(wishes) == pytest.approx(share)

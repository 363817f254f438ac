"""Paired tests, against their exact distributions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from tasks.trees.paired import holm, permutation_test


def test_values_of_zero_and_one_give_mcnemars_exact_test():
    one = np.array([1, 1, 1, 1, 1, 1, 0, 1, 0, 1], float)
    two = np.array([0, 0, 0, 0, 0, 0, 1, 1, 0, 1], float)  # 6 questions gained, 1 lost
    exact = binomtest(1, 7).pvalue
    assert permutation_test(one, two, seed=0) == pytest.approx(exact)
    assert permutation_test(two, one, seed=0) == pytest.approx(exact)


def test_drawn_permutations_come_close_and_repeat():
    one, two = np.random.default_rng(0).integers(2, size=(2, 900)).astype(float)
    one[:40] = 1.0
    gained, lost = int(((one == 1) & (two == 0)).sum()), int(((one == 0) & (two == 1)).sum())
    found = permutation_test(one, two, seed=3)
    assert found == permutation_test(one, two, seed=3)
    assert found == pytest.approx(binomtest(gained, gained + lost).pvalue, abs=0.02)


def test_equal_agents_differ_by_chance_alone():
    assert permutation_test(np.ones(5), np.ones(5), seed=0) == 1.0
    assert permutation_test(np.ones(1), np.zeros(1), seed=0) == 1.0


def test_holm_on_a_worked_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_holm_lies_between_no_correction_and_bonferronis(p_values):
    for one, adjusted in zip(p_values, holm(p_values), strict=True):
        assert one <= adjusted <= min(1.0, len(p_values) * one)
    order = np.argsort(p_values, kind="stable")
    assert list(np.array(holm(p_values))[order]) == sorted(holm(p_values))

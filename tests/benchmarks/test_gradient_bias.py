"""Expected gradients by enumeration, through the project's own trees, credit and loss."""

from dataclasses import replace

import pytest

from benchmarks.gradient_bias import CASES, expected, variant

UNBIASED = "tree_value (and constant_length)"


def direction(case, name):
    return expected(CASES[case], variant(name)).direction.tolist()


def cosine(case, name, trees=1):
    return expected(CASES[case], variant(name), trees).cosine


def test_probabilities_of_outcomes_sum_to_one():
    for case in CASES.values():
        assert sum(case.outcomes().values()) == pytest.approx(1)


def test_leaves_that_count_once_bias_the_rows_that_branch():
    assert direction("one choice, 3 leaves", "tree_value, as it was") == pytest.approx(
        [1, -0.602, -0.398], abs=5e-4
    )
    biased = {"arpo": 0.997, "arpo without std": 0.998, "tree_value, as it was": 0.984}
    for name, measured in biased.items():
        assert cosine("one choice, 3 leaves", name) == pytest.approx(measured, abs=5e-4)
    assert cosine("one choice, 6 leaves", "tree_value, as it was") == pytest.approx(0.953, abs=5e-4)


@pytest.mark.parametrize("trees", [1, 16])
@pytest.mark.parametrize(
    "case",
    [
        "one choice, 3 leaves",
        "one choice, 6 leaves",
        "two choices, 2 leaves",
        "two choices, longer turns",
    ],
)
def test_tree_value_has_the_direction_of_the_policy_gradient(case, trees):
    assert cosine(case, UNBIASED, trees) == pytest.approx(1, abs=1e-9)


def test_each_choice_of_tree_value_is_needed():
    """Where points have unequal numbers of paths, and turns unequal lengths."""
    short, long = "two choices, 2 leaves", "two choices, longer turns"
    assert cosine("one choice, 3 leaves", "the same with counts: paths") > 1 - 1e-9
    assert cosine(short, "the same with counts: paths") < 0.995
    assert cosine(short, "... and leave_one_out") > 1 - 1e-9
    assert cosine(long, "... and leave_one_out") < 0.98


def test_what_fills_up_a_budget_leaves_a_bias_that_more_trees_take_away():
    case = "one choice, budget of 8"
    assert 0.999 < cosine(case, UNBIASED) < 0.9999
    assert cosine(case, UNBIASED, 16) > 0.99999
    assert cosine(case, "tree_value, as it was", 16) < 0.99
    assert cosine(case, "arpo", 16) < 0.996


def test_a_rule_that_looks_ahead_leaves_a_bias():
    case = replace(CASES["two choices, judged after"], initial=2)
    assert 0.98 < expected(case, variant(UNBIASED), 16).cosine < 0.995

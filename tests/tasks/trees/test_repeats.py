"""Estimates from several answers, against all subsets of them."""

from functools import partial
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.trees.repeats import all_right, any_right, majority_right

RIGHT = st.lists(st.booleans(), min_size=1, max_size=8)


@given(RIGHT, st.data())
def test_pass_at_k_and_pass_to_the_k_are_shares_of_subsets(right, data):
    k = data.draw(st.integers(1, len(right)))
    subsets = list(combinations(right, k))
    assert any_right(right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert all_right(right, k) == pytest.approx(sum(map(all, subsets)) / len(subsets))


@pytest.mark.parametrize("k", [0, 4])
def test_k_is_between_one_and_the_answers(k):
    for estimate in (any_right, all_right):
        with pytest.raises(ValueError, match=f"k is {k}, of 3 answers"):
            estimate([True, False, True], k)


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        (["7", "8", "7"], [True, False, True], 1.0),
        (["8", "8", "7"], [False, False, True], 0.0),
        (["Oslo", " oslo ", "Rome", "Rome"], [True, True, False, False], 0.5),
        ([None, None, "7"], [False, False, True], 1.0),
        ([None, None], [False, False], 0.0),
        (["7"], [True], 1.0),
    ],
)
def test_the_majority_of_answers(answers, right, expected):
    assert majority_right(answers, right) == expected


def test_the_majority_counts_values_not_texts():
    right = [True, True, False, False, False]
    answers = ["1/2", "0.5", "3", "2", "4"]
    assert majority_right(answers, right) == 1.0
    wrong = ["3", "3.0", "3.00", "1/2", "0.5"]
    by_value = partial(majority_right, wrong, [False, False, False, True, True])
    assert by_value() == 1.0  # as texts, the three wrong ones differ
    assert by_value(same=lambda one, other: float(one) == float(other)) == 0.0

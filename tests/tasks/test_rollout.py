"""Which questions an iteration gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.ledger import Step
from tasks.rollout import batch
from tasks.trajectory import Question


def questions(count):
    return [Question(str(i), "toy", f"question {i}", ("1",)) for i in range(count)]


def ids(count, iteration, size, seed=0):
    chosen = batch(questions(count), Step("toy", "reinforce", iteration, seed), size)
    return [question.id for question in chosen]


counts, sizes, seeds = st.integers(1, 12), st.integers(1, 15), st.integers(0, 99)


@given(count=counts, passes=st.integers(1, 3), seed=seeds)
def test_a_pass_asks_every_question_once(count, passes, seed):
    one_by_one = [ids(count, i, 1, seed)[0] for i in range(count * passes)]
    for start in range(0, len(one_by_one), count):
        assert sorted(one_by_one[start : start + count]) == sorted(map(str, range(count)))


@given(count=counts, size=sizes, seed=seeds)
def test_batches_are_cut_from_the_endless_sequence_of_passes(count, size, seed):
    """Where a batch reaches into the next pass, a question that comes twice is asked once."""
    sequence = [ids(count, i, 1, seed)[0] for i in range(4 * size)]
    for iteration in range(4):
        places = sequence[iteration * size : (iteration + 1) * size]
        chosen = ids(count, iteration, size, seed)
        assert chosen == list(dict.fromkeys(places))
        assert len(set(chosen)) == len(chosen)


def test_a_batch_does_not_depend_on_which_ones_were_asked_before():
    unbroken = [ids(10, i, 4) for i in range(6)]
    assert [ids(10, i, 4) for i in reversed(range(6))] == unbroken[::-1]


def test_passes_and_seeds_have_orders_of_their_own():
    assert ids(20, 0, 20) != ids(20, 1, 20)
    assert ids(20, 0, 20) != ids(20, 0, 20, seed=1)
    assert ids(20, 0, 20) != [str(i) for i in range(20)]


@pytest.mark.parametrize("size", [5, 8, 100])
def test_a_batch_holds_at_most_every_question(size):
    assert sorted(ids(5, 0, size)) == sorted(map(str, range(5)))

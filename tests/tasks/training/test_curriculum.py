"""A curriculum: questions that taught nothing come back later, by counting."""

from hypothesis import given
from hypothesis import strategies as st

from tasks.rollout import pass_order
from tasks.training.curriculum import choose, due_after

IDS = [f"q{number}" for number in range(7)]
SEED = 3


def asked(iterations, size, rest, alike):
    """The questions of each iteration, where ``alike`` says of which groups had no spread."""
    due, place, batches = {}, 0, []
    for number in range(iterations):
        found = choose(IDS, SEED, place, size, due)
        batches.append(list(found.passes))
        without = [question for question in found.passes if alike(question, number)]
        due, place = {**due, **due_after(found.passes, without, rest)}, found.place
    return batches


def test_where_all_groups_have_spread_each_pass_asks_all():
    batches = asked(21, 1, 1, lambda question, number: False)
    flat = [question for batch in batches for question in batch]
    for number in range(3):
        order = [IDS[index] for index in pass_order(7, SEED, number)]
        assert flat[7 * number : 7 * number + 7] == order


def test_a_question_without_spread_is_left_out_of_the_next_passes():
    """Two of seven never have spread: they are in one pass of three."""
    flat = [q for batch in asked(19, 1, 2, lambda question, _: question in IDS[:2]) for q in batch]
    assert sorted(flat[:7]) == IDS
    assert sorted(flat[7:12]) == sorted(flat[12:17]) == IDS[2:]
    flat = [q for batch in asked(24, 1, 2, lambda question, _: question in IDS[:2]) for q in batch]
    assert sorted(flat[17:]) == IDS, "the fourth pass asks all again"


def test_where_all_rest_their_passes_are_skipped():
    batches = asked(14, 1, 5, lambda question, number: True)
    assert sorted(q for batch in batches[:7] for q in batch) == IDS
    assert sorted(q for batch in batches[7:] for q in batch) == IDS


@given(
    st.integers(1, 9),
    st.integers(1, 3),
    st.sets(st.tuples(st.sampled_from(IDS), st.integers(0, 9))),
)
def test_a_batch_is_full_and_asks_nothing_twice(size, rest, spread):
    for batch in asked(10, size, rest, lambda q, number: (q, number) not in spread):
        assert len(batch) == len(set(batch)) == min(size, len(IDS))


def test_a_further_batch_asks_what_the_iteration_has_not_asked():
    first = choose(IDS, SEED, 0, 5, {})
    second = choose(IDS, SEED, first.place, 5, {}, first.passes)
    assert sorted([*first.passes, *second.passes]) == IDS
    assert not choose(IDS, SEED, second.place, 5, {}, [*first.passes, *second.passes]).passes

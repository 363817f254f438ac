"""Draws from a replay buffer, and what the buffer holds."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from params.schema.reward_model import Again
from tasks.learning.replay import DRAWS, Buffer, Example, Scored, balanced, mebibytes, pairs
from tasks.ledger.artifacts import Artifact

LABELS = st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=40)
KEY = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))


def examples(labels):
    """(question, success) of each trajectory."""
    return [
        Example(place, 0, f"q{question}", success)
        for place, (question, success) in enumerate(labels)
    ]


@given(LABELS, KEY)
def test_half_of_a_draw_succeeded(labels, key):
    made = examples(labels)
    if len({one.success for one in made}) < 2:
        with pytest.raises(ValueError, match="have the same label"):
            balanced(made, 6, key)
        return
    drawn = [made[place].success for place in balanced(made, 6, key)]
    assert drawn == [True] * 3 + [False] * 3
    assert balanced(made, 6, key).tolist() == balanced(made, 6, key).tolist()


@given(LABELS, KEY)
def test_pairs_are_of_one_question(labels, key):
    made = examples(labels)
    both = {q for q, success in labels if success} & {q for q, success in labels if not success}
    if not both:
        with pytest.raises(ValueError, match="no question has trajectories with different"):
            pairs(made, 8, key)
        return
    drawn = [made[place] for place in pairs(made, 8, key)]
    for success, failure in zip(drawn[:4], drawn[4:], strict=True):
        assert success.question == failure.question
        assert success.success and not failure.success


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_each_step_draws_anew_and_all_are_drawn(draw):
    made = examples([(place % 5, place % 2 == 0) for place in range(20)])
    batches = [draw(made, 8, [0, 0, step]).tolist() for step in range(60)]
    assert len({tuple(batch) for batch in batches}) > 50
    assert {place for batch in batches for place in batch} == set(range(20))


@pytest.fixture
def batches(tmp_path):
    """A function that writes a batch of one mebibyte."""

    def made(name):
        folder = tmp_path / name
        folder.mkdir()
        Path(folder, "nodes.parquet").write_bytes(b"0" * 2**20)
        return Scored(Artifact(str(folder), name), Artifact("unused", name))

    return made


def limits(iterations, most):
    return Again(every=1, frozen=0, steps=1, iterations=iterations, mebibytes=most)


@pytest.mark.parametrize(
    ("iterations", "most", "kept"),
    [(10, 99, ["0", "1", "2", "3"]), (2, 99, ["2", "3"]), (10, 3, ["2", "3"]), (10, 1, ["3"])],
)
def test_the_buffer_keeps_the_first_trees_and_the_newest(batches, iterations, most, kept):
    buffer = Buffer((batches("first"),))
    for number in range(4):
        buffer = buffer.add([batches(str(number))], limits(iterations, most))
    assert [batch.trees.digest for batch in buffer.batches] == ["first", *kept]
    assert mebibytes(buffer.batches) == 1 + len(kept)


def test_the_newest_iteration_stays_whatever_its_size(batches):
    buffer = Buffer(()).add([batches("a"), batches("b"), batches("c")], limits(4, 1))
    assert len(buffer.batches) == 3
    assert len(buffer.add([batches("d")], limits(4, 1)).batches) == 1

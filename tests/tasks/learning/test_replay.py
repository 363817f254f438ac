"""Draws from a replay buffer, and what the buffer holds."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from params.schema.reward_model import Again
from tasks.learning.replay import Buffer, Example, ScoredTrees, draw, mebibytes
from tasks.ledger.artifacts import Artifact

LABELS = st.lists(
    st.tuples(st.integers(0, 4), st.booleans(), st.booleans()), min_size=1, max_size=40
)
KEY = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
KINDS = ("classification", "pairs")


def examples(labels):
    """(question, success, newest) of each trajectory."""
    return [
        Example(place, 0, f"q{question}", success, newest)
        for place, (question, success, newest) in enumerate(labels)
    ]


def ages(labels, kind, success):
    """Of which ages this label can be drawn; for pairs, only questions with both labels count."""
    found = set()
    for question, label, newest in labels:
        other = (question, not label, newest) in labels
        if label == success and (other or kind == "classification"):
            found.add(newest)
    return found


@given(LABELS, KEY, st.sampled_from(KINDS))
def test_a_draw_is_balanced(labels, key, kind):
    """Half of it succeeded; half of each label is of the newest iterations, where these have it."""
    made = examples(labels)
    able = {label: ages(labels, kind, label) for label in (True, False)}
    if not all(able.values()):
        with pytest.raises(ValueError, match="label"):
            draw(made, kind, 8, key)
        return
    drawn = [made[place] for place in draw(made, kind, 8, key)]
    assert [one.success for one in drawn] == [True] * 4 + [False] * 4
    for label, of_label in ((True, drawn[:4]), (False, drawn[4:])):
        newest = sum(one.newest for one in of_label)
        assert newest == (2 if len(able[label]) == 2 else 4 * (able[label] == {True}))
    if kind == "pairs":
        questions = [one.question for one in drawn]
        assert questions[:4] == questions[4:]
    assert draw(made, kind, 8, key).tolist() == draw(made, kind, 8, key).tolist()


def test_failures_of_a_policy_that_always_fails_are_drawn():
    made = examples([(n, n % 2 == 0, False) for n in range(9)] + [(0, False, True)])
    drawn = [made[place] for place in draw(made, "classification", 8, [0])]
    assert [one.newest for one in drawn] == [False] * 6 + [True] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [6, 8])
def test_each_step_draws_anew_and_all_are_drawn(kind, batch):
    made = examples([(place % 5, place % 2 == 0, place >= 30) for place in range(40)])
    batches = [draw(made, kind, batch, [0, 0, step]).tolist() for step in range(200)]
    assert {len(one) for one in batches} == {batch}
    assert len({tuple(one) for one in batches}) > 100
    assert {place for one in batches for place in one} == set(range(40))


@pytest.fixture
def batches(tmp_path):
    """A function that writes a batch of one mebibyte."""

    def made(name):
        folder = tmp_path / name
        folder.mkdir()
        Path(folder, "nodes.parquet").write_bytes(b"0" * 2**20)
        return ScoredTrees(Artifact(str(folder), name), Artifact("unused", name))

    return made


def limits(iterations, most):
    return Again(every=1, frozen=0, steps=1, iterations=iterations, mebibytes=most)


@pytest.mark.parametrize(
    ("iterations", "most", "kept"),
    [(10, 99, ["0", "1", "2", "3"]), (2, 99, ["2", "3"]), (10, 2, ["2", "3"]), (10, 1, ["3"])],
)
def test_the_buffer_keeps_the_first_trees_and_the_newest(batches, iterations, most, kept):
    buffer = Buffer((batches("first"),))
    for number in range(4):
        buffer = buffer.add([batches(str(number))], limits(iterations, most))
    assert [batch.trees.digest for batch in buffer.batches] == ["first", *kept]
    assert mebibytes(buffer.batches) == 1 + len(kept)  # the limit is of the iterations


def test_the_newest_iteration_stays_whatever_its_size(batches):
    buffer = Buffer(()).add([batches("a"), batches("b"), batches("c")], limits(4, 1))
    assert len(buffer.batches) == 3
    assert len(buffer.add([batches("d")], limits(4, 1)).batches) == 1

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.packing import Row, micro_batches, row
from tasks.trajectory import PROMPT, RESULT, TURN, Node

NONE = np.zeros(0, np.float32)


def node(kind, tokens, logprobs=()):
    return Node(-1, kind, "", "", np.array(tokens, np.int32), np.array(logprobs, np.float32), NONE)


def made_of(lengths, seed=0):
    """Rows of some lengths; the first token of each names the row."""
    random = np.random.default_rng(seed)
    return [
        Row(
            tokens=np.array([i + 1, *random.integers(1, 99, n - 1)], np.int32),
            mask=random.random(n) < 0.6,
            old_logprobs=random.random(n).astype(np.float32),
            advantage=float(random.standard_normal()),
        )
        for i, n in enumerate(lengths)
    ]


def test_a_trajectory_becomes_one_row():
    made = row(
        [
            node(PROMPT, [1, 2]),
            node(TURN, [3, 4], [-0.5, -0.25]),
            node(RESULT, [5]),
            node(TURN, [6], [-1.0]),
        ],
        advantage=0.75,
    )
    assert made.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert made.mask.tolist() == [False, False, True, True, False, True]
    assert made.old_logprobs.tolist() == [0, 0, -0.5, -0.25, 0, -1]
    assert (made.sampled, made.advantage) == (3, 0.75)
    assert (made.tokens.dtype, made.old_logprobs.dtype) == (np.int32, np.float32)


def test_a_batch_holds_what_its_rows_hold_with_the_padding_behind():
    rows = [
        Row(
            np.array([7, 8, 9], np.int32),
            np.array([0, 1, 1], bool),
            np.array([0, -1, -2], "f"),
            2.0,
        ),
        Row(np.array([5], np.int32), np.array([1], bool), np.array([-3], "f"), -1.0),
    ]
    (batch,) = micro_batches(rows, 100, "cpu")
    assert batch.tokens.tolist() == [[5, 0, 0], [7, 8, 9]]
    assert batch.mask.tolist() == [[True, False, False], [False, True, True]]
    assert batch.old_logprobs.tolist() == [[-3, 0, 0], [0, -1, -2]]
    assert batch.advantages.tolist() == [[-1, -1, -1], [2, 2, 2]]
    assert (batch.tokens.dtype, batch.mask.dtype) == (torch.int64, torch.bool)


@given(st.lists(st.integers(1, 40), max_size=25), st.integers(1, 120))
def test_every_row_appears_once_and_whole_and_no_batch_is_too_large(lengths, limit):
    rows = made_of(lengths)
    seen = []
    for batch in micro_batches(rows, limit, "cpu"):
        count, width = batch.tokens.shape
        assert count * width <= limit or count == 1
        for i in range(count):
            number = int(batch.tokens[i, 0]) - 1
            seen.append(number)
            expected, length = rows[number], lengths[number]
            assert batch.tokens[i, :length].tolist() == expected.tokens.tolist()
            assert batch.mask[i, :length].tolist() == expected.mask.tolist()
            assert batch.old_logprobs[i, :length].tolist() == expected.old_logprobs.tolist()
            assert batch.advantages[i].tolist() == [np.float32(expected.advantage)] * width
            assert not batch.mask[i, length:].any()
        assert width == max(lengths[int(first) - 1] for first in batch.tokens[:, 0])
    assert sorted(seen) == list(range(len(rows)))


def test_rows_of_similar_length_lie_side_by_side():
    batches = micro_batches(made_of([40, 2, 39, 3]), 80, "cpu")
    assert [list(batch.tokens.shape) for batch in batches] == [[2, 3], [2, 40]]


@pytest.mark.parametrize("lengths", [[], [5]])
def test_few_rows_give_few_batches(lengths):
    assert len(micro_batches(made_of(lengths), 8, "cpu")) == len(lengths)

"""Segmentations of trajectories, by hand and for whatever is written."""

import re
import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from params.schema.algorithms import Marks
from tasks.trees.marks import KINDS, completed, ends, segments, token_texts
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import PROMPT, RESULT, TURN, Node, Observation

PIECES = ["\n", "\n\n", "\n\n\n", "a", "b\n", "\nc", "<", "/", "</", "py", "python", "python>"]
PIECES += ["thon", ">", ">d", "</python>", "</search>", "</think>", "<python>", "", "e\n\nf\n\ng"]
PIECES += ["<think>", "think", "thi", "nk>"]
ID = {piece: token for token, piece in enumerate(PIECES)}
MARKS = {
    "none": Marks(kind="none"),
    "every_token": Marks(kind="every_token"),
    "tool_call": Marks(kind="tool_call"),
    "paragraph": Marks(kind="paragraph"),
    "think": Marks(kind="think"),
    "quantile": Marks(kind="entropy", quantile=0.5),
    "threshold": Marks(kind="entropy", threshold=0.5),
    "step": Marks(kind="step"),
}


def node(kind, pieces, entropies=None, outcome=""):
    """A node of these pieces of text."""
    tokens = np.array([ID[piece] for piece in pieces], np.int32)
    sampled = len(tokens) if kind == TURN else 0
    values = np.resize(np.array(entropies or [0.5], np.float32), sampled)
    return Node(-1, kind, outcome, "".join(pieces), tokens, -1 - values, values)


def trajectory(*turns):
    """A prompt and these turns, with a result that is full of marks between each two."""
    prompt, result = (node(kind, ["</python>", "\n\n", "a"]) for kind in (PROMPT, RESULT))
    nodes = [prompt]
    for turn in turns:
        nodes += [node(TURN, turn), result]
    return nodes[:-1]


def marked(kind, *turns):
    """The sampled tokens that end a segment."""
    return np.flatnonzero(ends(MARKS[kind], trajectory(*turns), PIECES)).tolist()


# by hand


@pytest.mark.parametrize(
    ("turn", "found"),
    [
        (["a", "</python>"], [1]),
        (["a", "</", "py", "thon", ">"], [4]),  # over several tokens
        (["<", "/", "python", ">d"], [3]),  # a token that goes on behind it
        (["a", "</", "python"], []),  # cut by the end
        (["</", "python", "a", ">"], []),
        (["</search>", "a", "</python>"], [0, 2]),
        (["<python>", "</think>", "a"], []),
        (["</", "", "python", "", ">", ""], [4]),
    ],
)
def test_tool_call_mark_completes_the_closing_tag(turn, found):
    assert marked("tool_call", turn) == found


@pytest.mark.parametrize("ending", ["call", "terminated", "no_answer"])
def test_acts_without_tags_end_where_their_turns_do(ending):
    """In both forms of prompt; a last turn that was no act has no mark."""
    moved = Observation("ok", "You see a.")
    prompt = node(PROMPT, ["a"])
    tagged = node(TURN, ["a", "</python>", "a"], outcome="call")
    free = replace(node(TURN, ["a", "a"], outcome="call"), observation=moved)
    last = node(TURN, ["a", "a", "a"], outcome=ending)
    last = replace(last, observation=moved if ending == "terminated" else None)
    path = [prompt, tagged, node(RESULT, ["</python>"]), free, node(PROMPT, ["</python>"]), last]
    found = np.flatnonzero(ends(MARKS["tool_call"], path, PIECES)).tolist()
    assert found == [1, 4, 7][: 2 + (ending != "no_answer")]
    assert np.flatnonzero(ends(MARKS["step"], path, PIECES)).tolist() == [2, 4, 7]
    assert segments(MARKS["step"], path, PIECES).tolist() == [0, 0, 0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("turn", "found"),
    [
        (["a", "\n\n", "a"], [1]),
        (["a", "\n", "\n", "a"], [2]),
        (["b\n", "\nc"], [1]),  # it begins and ends inside a token
        (["\n\n\n", "a"], [0]),
        (["a", "\n", "\n", "\n", "a"], [2]),  # a run of newlines is one mark, at its second
        (["\n", "\n\n", "\n\n"], [1]),
        (["e\n\nf\n\ng", "a"], [0]),  # two in one token are one boundary
        (["a", "b\n"], []),  # cut by the end
        (["b\n", "a", "\n"], []),
    ],
)
def test_paragraph_mark_completes_a_blank_line(turn, found):
    assert marked("paragraph", turn) == found


@pytest.mark.parametrize(
    ("turn", "found"),
    [
        (["<think>", "a", "</think>", "a"], [0, 2]),
        (["a", "</think>", "a"], [1]),  # a template that opens the thought itself
        (["<", "think", ">", "a", "</", "thi", "nk>", "a"], [2, 6]),  # over several tokens
        (["<", "think", ">d", "a"], [2]),  # a token that goes on behind it
        (["a", "</", "think"], []),  # cut by the end
        (["think", ">", "</", "a", "think", ">"], []),
        (["<think>", "<think>", "</think>"], [0, 1, 2]),  # balanced or not
        (["<python>", "a", "</python>"], []),
    ],
)
def test_think_mark_completes_either_tag(turn, found):
    assert marked("think", turn) == found


def test_no_mark_reaches_over_a_tool_result():
    assert marked("paragraph", ["a", "\n"], ["\n", "a"]) == []
    assert marked("tool_call", ["</", "python"], [">", "a"]) == []
    assert marked("think", ["</", "think"], [">", "a"]) == []


def test_a_mark_in_the_parts_of_one_turn_is_found():
    """Where trajectories part inside a turn, its parts are nodes of their own."""
    parts = [
        node(TURN, ["a", "</"], outcome=Outcome.PART),
        node(TURN, ["python"], outcome=Outcome.PART),
    ]
    nodes = [node(PROMPT, ["a"]), *parts, node(TURN, [">", "a"])]
    assert np.flatnonzero(ends(MARKS["tool_call"], nodes, PIECES)).tolist() == [3]
    assert np.flatnonzero(ends(MARKS["step"], nodes, PIECES)).tolist() == [4]


def test_each_turn_is_a_step():
    assert marked("step", ["a", "a"], ["a"], ["a", "a", "a"]) == [1, 2, 5]
    assert marked("step", ["a"], [], ["a"]) == [0, 1]  # nothing sampled, nothing ended


def test_none_and_every_token():
    assert marked("none", ["a", "</python>"], ["\n\n"]) == []
    assert marked("every_token", ["a", "a"], ["a"]) == [0, 1, 2]


def entropies(marks, *turns):
    result = node(RESULT, ["a"])
    nodes = [node(PROMPT, ["a"])]
    for turn in turns:
        nodes += [node(TURN, ["a"] * len(turn), turn), result]
    return np.flatnonzero(ends(marks, nodes[:-1], PIECES)).tolist()


def test_entropy_marks_are_above_the_threshold():
    marks = Marks(kind="entropy", threshold=0.5)
    assert entropies(marks, [0.5, 0.6, 0.1], [0.9, 0.4]) == [1, 3]


def test_entropy_marks_are_above_the_quantile():
    """Of 0.1 ... 1.0 the quantile 0.75 is 0.775: three lie above, two of them in one turn."""
    marks = Marks(kind="entropy", quantile=0.75)
    assert entropies(marks, [0.1, 0.9, 0.3, 0.4, 0.5], [0.6, 1.0, 0.8, 0.2, 0.7]) == [1, 6, 7]
    assert entropies(marks, [0.3, 0.3, 0.3]) == []


def test_segments_end_after_marks():
    nodes = trajectory(["a", "\n\n", "a"], ["a", "\n\n"])
    assert segments(MARKS["paragraph"], nodes, PIECES).tolist() == [0, 0, 1, 1, 1]
    assert segments(MARKS["step"], nodes, PIECES).tolist() == [0, 0, 0, 1, 1]
    assert segments(MARKS["every_token"], nodes, PIECES).tolist() == [0, 1, 2, 3, 4]
    assert segments(MARKS["none"], nodes, PIECES).tolist() == [0] * 5


@pytest.mark.parametrize("kind", MARKS)
def test_no_sampled_tokens_no_segments(kind):
    for nodes in ([node(PROMPT, ["a"])], trajectory([]), []):
        found = segments(MARKS[kind], nodes, PIECES)
        assert (found.dtype, found.shape) == (np.int64, (0,))


def test_every_kind_of_marks_can_be_found():
    assert set(KINDS) == set(Marks.model_fields["kind"].annotation.__args__)
    assert {marks.kind for marks in MARKS.values()} == set(KINDS)


# whatever is written

turns = st.lists(st.lists(st.sampled_from(PIECES), max_size=8), min_size=1, max_size=4)


@given(turns, st.sampled_from(list(MARKS)), st.data())
def test_segments_cover_all_sampled_tokens(written, kind, data):
    nodes = trajectory(*written)
    logprobs = np.concatenate([n.logprobs for n in nodes])
    found = segments(MARKS[kind], nodes, PIECES)
    assert (found.dtype, found.shape) == (np.int64, logprobs.shape)
    if len(found):
        assert found[0] == 0
        assert set(np.diff(found)) <= {0, 1}
        inner = ends(MARKS[kind], nodes, PIECES)[:-1].sum()
        assert found[-1] == inner  # one more segment than marks inside
        by_segment = np.bincount(found, logprobs)
        assert (np.bincount(found) > 0).all()
        assert by_segment.sum() == pytest.approx(logprobs.sum(dtype=np.float64))


@given(turns, st.sampled_from(["tool_call", "paragraph", "think"]))
def test_written_marks_equal_a_slow_search(written, kind):
    """Token by token: a mark is complete where the text so far ends inside the token with it."""
    slow = []
    for turn in written:
        for last in range(len(turn)):
            before, after = "".join(turn[:last]), "".join(turn[: last + 1])
            slow.append(
                any(complete(after[:end], kind) for end in range(len(before) + 1, len(after) + 1))
            )
    found = ends(MARKS[kind], trajectory(*written), PIECES)
    assert found.tolist() == slow


def complete(text, kind):
    if kind == "tool_call":
        return text.endswith(("</python>", "</search>"))
    if kind == "think":
        return text.endswith(("<think>", "</think>"))
    return text.endswith("\n\n") and not text.endswith("\n\n\n")


@given(turns, st.sampled_from(list(MARKS)), st.data())
def test_segments_do_not_depend_on_parts(written, kind, data):
    nodes = trajectory(*written)
    parted = []
    for whole in nodes:
        cut = data.draw(st.integers(0, len(whole.tokens))) if whole.kind == TURN else 0
        pieces = [PIECES[token] for token in whole.tokens]
        values = whole.entropies.tolist()
        parted += (
            [
                node(TURN, pieces[:cut], values[:cut], Outcome.PART),
                node(TURN, pieces[cut:], values[cut:]),
            ]
            if whole.kind == TURN
            else [whole]
        )
    theirs = segments(MARKS[kind], nodes, PIECES)
    np.testing.assert_array_equal(segments(MARKS[kind], parted, PIECES), theirs)


@given(turns, st.sampled_from(list(MARKS)))
def test_what_is_observed_never_matters(written, kind):
    nodes = trajectory(*written)
    other = [n if n.kind == TURN else node(n.kind, ["\n", "</search>"]) for n in nodes]
    np.testing.assert_array_equal(
        segments(MARKS[kind], other, PIECES), segments(MARKS[kind], nodes, PIECES)
    )


def test_completed_gives_each_token_once():
    assert completed(re.compile("ab"), ["a", "bab", "aba", "b"]).tolist() == [1, 2, 3]
    assert completed(re.compile("ab"), []).tolist() == []


# the texts of tokens


class Counting:
    """A tokenizer that is asked for its texts."""

    def __init__(self):
        self.asked = []

    def batch_decode(self, batch):
        self.asked += [token for (token,) in batch]
        return [f"<{token}>" for (token,) in batch]


def test_token_texts_are_decoded_once():
    tokenizer, other = Counting(), Counting()
    assert token_texts(tokenizer, 2) == ["<0>", "<1>"]
    assert token_texts(tokenizer, 4)[3] == "<3>"
    assert len(token_texts(tokenizer, 1)) == 4
    assert tokenizer.asked == [0, 1, 2, 3]
    assert token_texts(other, 1) == ["<0>"]


def test_texts_of_a_tokenizer_are_forgotten_with_it():
    tokenizer = Counting()
    token_texts(tokenizer, 3)
    seen = weakref.ref(tokenizer)
    del tokenizer
    assert seen() is None


def test_tags_of_the_tiny_policy_are_single_tokens(tokenizer):
    pieces = token_texts(tokenizer, len(tokenizer))
    text = "<think>é</think>\n\n<python>1</python>"
    tokens = np.array(tokenizer.encode(text), np.int32)
    none = np.zeros(len(tokens), np.float32)
    nodes = [Node(0, TURN, "call", text, tokens, none, none)]
    last = np.flatnonzero(ends(MARKS["tool_call"], nodes, pieces)).tolist()
    assert last == [len(tokens) - 1]
    (blank,) = np.flatnonzero(ends(MARKS["paragraph"], nodes, pieces))
    assert tokenizer.decode(tokens[: blank + 1]).endswith("</think>\n\n")

"""Trees and their tables."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tasks.trees import tables
from tasks.trees.outcomes import Outcome
from tasks.trees.tables import (
    load_questions,
    load_trees,
    read_rows,
    save_questions,
    save_trees,
    write_table,
)
from tasks.trees.tree import (
    AFTER_RESULT,
    AT_MARK,
    PROMPT,
    RESULT,
    TURN,
    Decision,
    Message,
    Node,
    Question,
    Tree,
    common_prefix,
    join,
    response,
    sampled,
    split,
)

# ---- one tree, by hand: two trajectories that part after a tool result


def node(parent: int, kind: str, text: str) -> Node:
    none = np.zeros(0, np.float32)
    return Node(parent, kind, "ok", text, np.zeros(1, np.int32), none, none)


TREE = Tree(
    Question("q", "toy", "prompt", ("1",)),
    [
        node(-1, PROMPT, "prompt"),
        node(0, TURN, "call "),
        node(1, RESULT, "result "),
        node(2, TURN, "first"),
        node(2, TURN, "second"),
    ],
    leaves=[4, 3],
)


def test_a_path_goes_from_the_root_to_the_leaf():
    assert TREE.path(4) == [0, 1, 2, 4]
    assert TREE.path(0) == [0]


def test_trajectories_come_in_leaf_order_and_share_nodes():
    second, first = TREE.trajectories()
    assert [response(second), response(first)] == ["call result second", "call result first"]
    assert [n.text for n in sampled(first)] == ["call ", "first"]
    assert all(a is b for a, b in zip(first[:3], second[:3], strict=True))


# ---- turns in parts


def turn_of(text: str, outcome: str = "answer", parent: int = 0) -> Node:
    """A turn that is written in bytes: a token is a byte."""
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    logprobs = -np.arange(len(tokens), dtype=np.float32)
    return Node(parent, TURN, outcome, text, tokens, logprobs, -logprobs / 100)


def decode(tokens) -> str:
    return bytes(tokens.tolist()).decode(errors="replace")


def same(ours: Node, theirs: Node) -> bool:
    return all(np.array_equal(value, getattr(theirs, name)) for name, value in vars(ours).items())


@given(st.data(), st.text("aé€😀 \N{REPLACEMENT CHARACTER}", min_size=1, max_size=12))
def test_the_parts_of_a_turn_add_up_to_it_also_where_characters_are_cut(data, text):
    whole = turn_of(text)
    cut = st.integers(1, len(whole.tokens))
    cuts = sorted(data.draw(st.sets(cut, max_size=4)) - {len(whole.tokens)})
    nodes, last = split([TREE.nodes[0], whole], {1: cuts}, decode)
    parts = nodes[1:]
    assert (len(parts), last) == (len(cuts) + 1, [0, len(cuts) + 1])
    assert [len(part.tokens) for part in parts] == np.diff([0, *cuts, len(whole.tokens)]).tolist()
    assert [part.parent for part in parts] == list(range(len(parts)))
    assert [part.outcome for part in parts] == [Outcome.PART] * len(cuts) + ["answer"]
    assert same(join(parts), whole)


def test_a_character_in_bytes_belongs_to_the_part_that_ends_it():
    nodes, _ = split([TREE.nodes[0], turn_of("né!")], {1: [2]}, decode)
    assert [part.text for part in nodes[1:]] == ["n", "é!"]


def test_bytes_that_never_became_a_character_stay_with_the_later_part():
    """Another trajectory may complete the character that the shared bytes begin."""
    broken = bytes([ord("n"), 0xC3, ord("!")])
    whole = turn_of("n\N{REPLACEMENT CHARACTER}!")
    tokens = np.frombuffer(broken, np.uint8).astype(np.int32)
    nodes, _ = split([TREE.nodes[0], replace(whole, tokens=tokens)], {1: [2]}, decode)
    assert [part.text for part in nodes[1:]] == ["n", "\N{REPLACEMENT CHARACTER}!"]


def test_only_what_is_cut_is_split_and_children_stay_behind_their_parents():
    tree = [
        node(-1, PROMPT, "prompt"),
        turn_of("abc", "call"),
        turn_of("xyz"),
        node(1, RESULT, "result"),
        turn_of("end", parent=3),
    ]
    nodes, last = split(tree, {2: [1], 1: [1, 2]}, decode)
    assert last == [0, 3, 5, 6, 7]
    assert [n.text for n in nodes] == ["prompt", "a", "b", "c", "x", "yz", "result", "end"]
    assert [n.parent for n in nodes] == [-1, 0, 1, 2, 0, 4, 3, 6]
    assert nodes[6] is not tree[3]
    assert same(nodes[0], tree[0])


def test_trajectories_have_whole_turns_whatever_the_parts():
    """prompt - ab(c - result - d | x)"""
    tree = Tree(
        TREE.question,
        [
            node(-1, PROMPT, "prompt"),
            turn_of("a", Outcome.PART, 0),
            turn_of("b", Outcome.PART, 1),
            turn_of("c", "call", 2),
            node(3, RESULT, "result"),
            turn_of("d", "answer", 4),
            turn_of("x", "cut", 2),
        ],
        leaves=[5, 6],
    )
    assert [tree.path(leaf) for leaf in tree.leaves] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 6]]
    assert tree.steps(5) == [[0], [1, 2, 3], [4], [5]]
    first, second = tree.trajectories()
    assert [n.text for n in first] == ["prompt", "abc", "result", "d"]
    assert [(n.text, n.outcome) for n in second[1:]] == [("abx", "cut")]
    assert decode(first[1].tokens) == "abc"
    assert len(first[1].logprobs) == len(first[1].entropies) == 3
    assert (first[1].outcome, first[1].parent) == ("call", 0)
    assert response(second) == "abx"


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [("", "a", 0), ("ab", "abc", 2), ("abc", "axc", 1), ("b", "a", 0)],
)
def test_texts_begin_alike_up_to_their_first_difference(first, second, length):
    assert common_prefix(first, second) == common_prefix(second, first) == length


# ---- tables

words = st.text(max_size=8)
messages = st.builds(Message, role=st.sampled_from(["system", "user", "assistant"]), content=words)
questions = st.builds(
    Question,
    id=words,
    kind=words,
    text=words,
    answers=st.lists(words, max_size=3).map(tuple),
    scorer=words,
    before=st.lists(messages, max_size=3).map(tuple),
)


def floats(length):
    return arrays.arrays(
        np.float32, length, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
    )


@st.composite
def nodes(draw, parent: int, kind: str):
    tokens = draw(arrays.arrays(np.int32, st.integers(0, 5), elements=st.integers(0, 2**31 - 1)))
    scores = floats(len(tokens) if kind == TURN else 0)
    return Node(parent, kind, draw(words), draw(words), tokens, draw(scores), draw(scores))


@st.composite
def trees(draw, question: Question):
    tree = Tree(question, [draw(nodes(-1, PROMPT))])
    for index in range(1, draw(st.integers(1, 6))):
        parent = draw(st.integers(0, index - 1))
        tree.nodes.append(draw(nodes(parent, draw(st.sampled_from([TURN, RESULT])))))
    some = st.integers(0, len(tree.nodes) - 1)
    number = st.floats(allow_nan=False)
    tree.leaves = draw(st.lists(some, max_size=4))
    decision = st.builds(
        Decision,
        kind=st.sampled_from([AFTER_RESULT, AT_MARK]),
        node=some,
        path=some,
        position=some,
        initial_entropy=number,
        entropy=number,
        rise=number,
        probability=st.none() | number,
        wanted=st.booleans(),
        added=some,
    )
    tree.decisions = draw(st.lists(decision, max_size=3))
    return tree


forests = st.lists(questions, max_size=3, unique_by=lambda question: question.id).flatmap(
    lambda chosen: st.tuples(*(trees(question) for question in chosen))
)
ARRAYS = ("tokens", "logprobs", "entropies")


def assert_same(ours: Tree, theirs: Tree):
    assert (ours.question, ours.leaves, ours.decisions) == (
        theirs.question,
        theirs.leaves,
        theirs.decisions,
    )
    for mine, its in zip(ours.nodes, theirs.nodes, strict=True):
        for name, value in vars(its).items():
            if name in ARRAYS:
                assert getattr(mine, name).dtype == value.dtype
                np.testing.assert_array_equal(getattr(mine, name), value)
            else:
                assert getattr(mine, name) == value


@settings(max_examples=40)
@given(forests)
def test_trees_come_back_as_they_were_saved(tmp_path_factory, forest):
    folder = tmp_path_factory.mktemp("trees")
    save_trees(forest, folder)
    for ours, theirs in zip(load_trees(folder), forest, strict=True):
        assert_same(ours, theirs)


@settings(max_examples=10)
@given(forests)
def test_equal_trees_give_equal_bytes(tmp_path_factory, forest):
    folders = [tmp_path_factory.mktemp("trees") for _ in range(2)]
    for folder in folders:
        save_trees(forest, folder)
    first, second = ({f.name: f.read_bytes() for f in folder.iterdir()} for folder in folders)
    assert first == second
    assert set(first) == {f"{n}.parquet" for n in ("questions", "nodes", "leaves", "decisions")}


@settings(max_examples=20)
@given(st.lists(questions))
def test_questions_come_back_as_they_were_saved(tmp_path_factory, chosen):
    file = tmp_path_factory.mktemp("questions") / "new" / "questions.parquet"
    save_questions(chosen, file)
    assert load_questions(file) == chosen


def test_a_question_is_compared_exactly_and_has_no_chat_unless_it_says_so(tmp_path):
    chat = (Message("system", "Be brief."), Message("user", "1+1?"), Message("assistant", "2"))
    plain, other = Question("q", "toy", "2+2?", ("4",)), Question("r", "", "", (), "f1", chat)
    assert (plain.scorer, plain.before) == ("exact", ())
    save_questions([plain, other], tmp_path / "questions.parquet")
    assert load_questions(tmp_path / "questions.parquet") == [plain, other]
    assert read_rows(tmp_path / "questions.parquet")[1]["before"] == [vars(each) for each in chat]


def test_a_write_that_fails_leaves_the_old_table(tmp_path, monkeypatch):
    file = tmp_path / "questions.parquet"
    save_questions([TREE.question], file)

    def half(table, partial, **_):
        partial.write_bytes(b"half a table")
        raise OSError("disk full")

    monkeypatch.setattr(tables.pq, "write_table", half)
    with pytest.raises(OSError, match="disk full"):
        save_questions([], file)
    assert load_questions(file) == [TREE.question]


def test_a_write_makes_its_folder_and_leaves_nothing_else(tmp_path):
    file = tmp_path / "new" / "questions.parquet"
    save_questions([TREE.question], file)
    write_table(tables.pq.read_table(file), file)
    row = {"id": "q", "kind": "toy", "text": "prompt", "answers": ["1"]}
    assert read_rows(file) == [{**row, "scorer": "exact", "before": []}]
    assert list(file.parent.iterdir()) == [file]

"""Trees and questions as Parquet tables."""

import hashlib
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tasks.trees import tables
from tasks.trees.tables import (
    StoredQuestions,
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
    CallResult,
    Decision,
    Message,
    Node,
    Observation,
    Question,
    Tree,
    join,
    note_experts,
    split,
)
from tests.examples import examples
from tests.trees import random_tree

QUESTION = Question("q", "toy", "prompt", ("1",))
words = st.text(max_size=8)
messages = st.builds(Message, role=st.sampled_from(["system", "user", "assistant"]), content=words)
ARRAYS = ("tokens", "logprobs", "entropies")
questions = st.builds(
    Question,
    id=words,
    kind=words,
    text=words,
    answers=st.lists(words, max_size=3).map(tuple),
    scorer=words,
    before=st.lists(messages, max_size=3).map(tuple),
)
observations = st.builds(
    Observation,
    outcome=words,
    text=words,
    reward=st.floats(allow_nan=False),
    terminated=st.booleans(),
    truncated=st.booleans(),
    state=st.none() | words,
    actions=st.lists(words, max_size=3).map(tuple),
    info=st.dictionaries(words, st.integers() | words | st.none(), max_size=3),
)


def floats(length):
    return arrays.arrays(
        np.float32, length, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
    )


@st.composite
def nodes(draw, parent: int, kind: str):
    tokens = draw(arrays.arrays(np.int32, st.integers(0, 5), elements=st.integers(0, 2**31 - 1)))
    scores = floats(len(tokens) if kind == TURN else 0)
    steps = draw(st.integers(0, 2**31 - 1))
    told = (draw(words), draw(words), tokens, draw(scores), draw(scores))
    result = st.builds(CallResult, *[words] * 5)
    results = draw(st.lists(result, max_size=3).map(tuple)) if kind == TURN else ()
    return Node(parent, kind, *told, policy_steps=steps, results=results)


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


@examples(40)
@given(forests)
def test_trees_come_back_as_they_were_saved(tmp_path_factory, forest):
    folder = tmp_path_factory.mktemp("trees")
    save_trees(forest, folder)
    for ours, theirs in zip(load_trees(folder), forest, strict=True):
        assert_same(ours, theirs)


@examples(10)
@given(forests)
def test_equal_trees_give_equal_bytes(tmp_path_factory, forest):
    folders = [tmp_path_factory.mktemp("trees") for _ in range(2)]
    for folder in folders:
        save_trees(forest, folder)
    first, second = ({f.name: f.read_bytes() for f in folder.iterdir()} for folder in folders)
    assert first == second
    assert set(first) == {f"{n}.parquet" for n in ("questions", "nodes", "leaves", "decisions")}


def test_tables_of_earlier_releases_are_read(tmp_path):
    """They name no policies, which are then the first, and one call a turn at most."""
    tokens, scores = np.array([1], np.int32), np.zeros(1, np.float32)
    turn = Node(0, TURN, "call", "a", tokens, scores, scores, policy_steps=7)
    turn = replace(turn, results=(CallResult("call_0", "python", "ok"),))
    tree = Tree(QUESTION, [replace(turn, parent=-1, kind=PROMPT), turn], [1])
    save_trees([tree], tmp_path)
    file = tmp_path / "nodes.parquet"
    write_table(pq.read_table(file).drop_columns(["policy_steps", "results"]), file)
    (read,) = load_trees(tmp_path)
    assert [node.policy_steps for node in read.nodes] == [0, 0]
    assert [node.results for node in read.nodes] == [(), ()]


def hashes(folder):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}


@examples(20)
@given(forests)
def test_trees_without_worlds_are_written_as_before(tmp_path_factory, forest):
    """Byte for byte what the four tables were before there were worlds."""
    now, before = (tmp_path_factory.mktemp("trees") for _ in range(2))
    save_trees(forest, now)
    rows = {
        "questions": [
            {**vars(t.question), "before": [vars(m) for m in t.question.before]} for t in forest
        ],
        "nodes": [
            {"question": t.question.id, "node": i, **vars(n), "results": [*map(vars, n.results)]}
            for t in forest
            for i, n in enumerate(t.nodes)
        ],
        "leaves": [
            {"question": t.question.id, "leaf": i, "node": n}
            for t in forest
            for i, n in enumerate(t.leaves)
        ],
        "decisions": [{"question": t.question.id, **vars(d)} for t in forest for d in t.decisions],
    }
    schemas = (tables.QUESTION_TABLE, tables.NODE_TABLE, tables.LEAF_TABLE, tables.DECISION_TABLE)
    for (name, entries), schema in zip(rows.items(), schemas, strict=True):
        columns = {column: [entry[column] for entry in entries] for column in schema.names}
        table = pa.table(columns, schema=schema)
        pq.write_table(table, before / f"{name}.parquet", compression="zstd")
    assert hashes(now) == hashes(before)
    assert [len(schema) for schema in schemas] == [6, 11, 3, 11]


@examples(40)
@given(forests, st.data())
def test_worlds_come_back_as_they_were_saved(tmp_path_factory, forest, data):
    for tree in forest:
        tree.question = replace(tree.question, data=data.draw(words))
        tree.nodes = [
            replace(n, observation=data.draw(st.none() | observations)) for n in tree.nodes
        ]
    folder = tmp_path_factory.mktemp("trees")
    save_trees(forest, folder)
    for ours, theirs in zip(load_trees(folder), forest, strict=True):
        assert_same(ours, theirs)
    seen = [node for tree in forest for node in tree.nodes if node.observation]
    assert (folder / "steps.parquet").exists() == bool(seen)
    named = pq.read_schema(folder / "questions.parquet").names
    assert ("data" in named) == any(tree.question.data for tree in forest)


@examples(20)
@given(st.lists(questions))
def test_questions_come_back_as_they_were_saved(tmp_path_factory, chosen):
    file = tmp_path_factory.mktemp("questions") / "new" / "questions.parquet"
    save_questions(chosen, file)
    assert load_questions(file) == chosen
    stored = StoredQuestions(file)
    assert list(stored) == chosen
    assert [stored[place] for place in reversed(range(len(stored)))] == chosen[::-1]
    with pytest.raises(IndexError):
        stored[len(chosen)]


def test_defaults_of_a_question(tmp_path):
    chat = (Message("system", "Be brief."), Message("user", "1+1?"), Message("assistant", "2"))
    plain, other = Question("q", "toy", "2+2?", ("4",)), Question("r", "", "", (), "f1", chat)
    assert (plain.scorer, plain.before) == ("exact", ())
    save_questions([plain, other], tmp_path / "questions.parquet")
    assert load_questions(tmp_path / "questions.parquet") == [plain, other]
    assert read_rows(tmp_path / "questions.parquet")[1]["before"] == [vars(each) for each in chat]


def test_a_write_that_fails_leaves_the_old_table(tmp_path, monkeypatch):
    file = tmp_path / "questions.parquet"
    save_questions([QUESTION], file)

    write = tables.pq.ParquetWriter.write_table

    def half(writer, *given, **more):
        write(writer, *given, **more)
        raise OSError("disk full")

    monkeypatch.setattr(tables.pq.ParquetWriter, "write_table", half)
    with pytest.raises(OSError, match="disk full"):
        save_questions([], file)
    assert load_questions(file) == [QUESTION]


def test_write_makes_its_folder(tmp_path):
    file = tmp_path / "new" / "questions.parquet"
    save_questions([QUESTION], file)
    write_table(tables.pq.read_table(file), file)
    row = {"id": "q", "kind": "toy", "text": "prompt", "answers": ["1"]}
    assert read_rows(file) == [{**row, "scorer": "exact", "before": []}]
    assert list(file.parent.iterdir()) == [file]


def test_experts_are_stored_beside_the_nodes_and_absent_without_mixtures(tmp_path):
    plain, mixture = random_tree(1, name="a"), random_tree(2, name="b")
    save_trees([plain], tmp_path / "dense")
    assert not (tmp_path / "dense/experts.parquet").exists()
    for kind, most in ((np.uint8, 256), (np.int16, 1000)):
        draw = np.random.default_rng(0)
        nodes = [
            replace(
                node,
                experts=draw.integers(0, most, (max(0, len(node.tokens) - 1), 3, 2)).astype(kind),
            )
            for node in mixture.nodes
        ]
        stored = [plain, replace(mixture, nodes=[*nodes[:-1], mixture.nodes[-1]])]
        save_trees(stored, tmp_path / "trees")
        first, second = load_trees(tmp_path / "trees")
        assert all(node.experts is None for node in first.nodes)
        assert second.nodes[-1].experts is None
        for node, expected in zip(second.nodes[:-1], nodes, strict=False):
            assert node.experts.dtype == kind
            np.testing.assert_array_equal(node.experts, expected.experts)
        dense = (tmp_path / "dense/leaves.parquet").read_bytes()
        save_trees([plain], tmp_path / "again")
        assert (tmp_path / "again/leaves.parquet").read_bytes() == dense


def test_experts_follow_a_context_through_parts_and_results():
    tree = random_tree(4, leaves=4)
    leaf = tree.leaves[0]
    path = tree.contexts(leaf)[-1]
    total = sum(len(tree.nodes[n].tokens) for n in path)
    numbers = np.arange(total, dtype=np.uint8)[:, None, None]
    begun = len(tree.nodes[path[0]].tokens) + 1
    note_experts(tree, leaf, numbers[:begun])  # an earlier turn
    note_experts(tree, leaf, numbers[: total - 1] + 100)  # a later one fills what was not known
    found = np.concatenate([tree.nodes[n].experts for n in path])[:, 0, 0]
    assert found.tolist() == [*range(begun), *range(begun + 100, total + 99)]
    whole = join([tree.nodes[n] for n in path])
    assert whole.experts.shape == (total - 1, 1, 1)
    turn = replace(whole, kind="turn", parent=-1)
    parts, _ = split([turn], {0: [2]}, lambda tokens: "")
    assert [len(part.experts) for part in parts] == [2, total - 3]

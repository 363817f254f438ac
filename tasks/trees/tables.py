"""Write and read trees, questions and other tables as Parquet files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.trees.tree import Decision, Message, Node, Question, Tree

STORED_TREES = "BEAMLINE_TREES"  # environment variable: folder of trees to use, not sample
MESSAGE = pa.struct({"role": pa.string(), "content": pa.string()})
QUESTION_TABLE = pa.schema(
    {
        "id": pa.string(),
        "kind": pa.string(),
        "text": pa.string(),
        "answers": pa.list_(pa.string()),
        "scorer": pa.string(),
        "before": pa.list_(MESSAGE),
    }
)
NODE_TABLE = pa.schema(
    {
        "question": pa.string(),
        "node": pa.int32(),
        "parent": pa.int32(),
        "kind": pa.string(),
        "outcome": pa.string(),
        "text": pa.string(),
        "tokens": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "entropies": pa.list_(pa.float32()),
    }
)
LEAF_TABLE = pa.schema({"question": pa.string(), "leaf": pa.int32(), "node": pa.int32()})
DECISION_TABLE = pa.schema(
    {
        "question": pa.string(),
        "kind": pa.string(),
        "node": pa.int32(),
        "path": pa.int32(),
        "position": pa.int32(),
        "initial_entropy": pa.float64(),
        "entropy": pa.float64(),
        "rise": pa.float64(),
        "probability": pa.float64(),  # null for marks
        "wanted": pa.bool_(),
        "added": pa.int32(),
    }
)


def save_trees(trees: Sequence[Tree], folder: Path) -> None:
    """Write the tables of questions, nodes, leaves and decisions into ``folder``."""
    nodes: dict[str, list[Any]] = {name: [] for name in NODE_TABLE.names}
    leaves: dict[str, list[Any]] = {name: [] for name in LEAF_TABLE.names}
    decisions: dict[str, list[Any]] = {name: [] for name in DECISION_TABLE.names}
    for tree in trees:
        for index, node in enumerate(tree.nodes):
            _add(nodes, question=tree.question.id, node=index, **vars(node))
        for index, leaf in enumerate(tree.leaves):
            _add(leaves, question=tree.question.id, leaf=index, node=leaf)
        for decision in tree.decisions:
            _add(decisions, question=tree.question.id, **vars(decision))
    save_questions([tree.question for tree in trees], folder / "questions.parquet")
    write_table(pa.table(nodes, schema=NODE_TABLE), folder / "nodes.parquet")
    write_table(pa.table(leaves, schema=LEAF_TABLE), folder / "leaves.parquet")
    write_table(pa.table(decisions, schema=DECISION_TABLE), folder / "decisions.parquet")


def load_trees(folder: Path, iteration: int | None = None) -> list[Tree]:
    """Read the trees in ``folder`` in their order; with ``iteration`` those of that iteration.

    Tables of a whole run have a column ``iteration``; those of ``save_trees`` have none.
    """
    questions = load_questions(folder / "questions.parquet", iteration)
    trees = {question.id: Tree(question) for question in questions}
    for row in read_rows(folder / "nodes.parquet", iteration):
        arrays: dict[str, Any] = {
            "tokens": np.array(row.pop("tokens"), np.int32),
            "logprobs": np.array(row.pop("logprobs"), np.float32),
            "entropies": np.array(row.pop("entropies"), np.float32),
        }
        tree = trees[row.pop("question")]
        del row["node"]
        tree.nodes.append(Node(**row, **arrays))
    for row in read_rows(folder / "leaves.parquet", iteration):
        trees[row["question"]].leaves.append(row["node"])
    for row in read_rows(folder / "decisions.parquet", iteration):
        trees[row.pop("question")].decisions.append(Decision(**row))
    return list(trees.values())


def save_questions(questions: Sequence[Question], file: Path) -> None:
    """Write a table with one row a question."""
    rows: dict[str, list[Any]] = {name: [] for name in QUESTION_TABLE.names}
    for question in questions:
        before = [vars(message) for message in question.before]
        _add(rows, **{**vars(question), "before": before})
    write_table(pa.table(rows, schema=QUESTION_TABLE), file)


def load_questions(file: Path, iteration: int | None = None) -> list[Question]:
    """Read the questions in ``file``; with ``iteration`` those of that iteration."""
    return [
        Question(
            **{
                **row,
                "answers": tuple(row["answers"]),
                "before": tuple(Message(**message) for message in row["before"]),
            }
        )
        for row in read_rows(file, iteration)
    ]


def write_table(table: pa.Table, file: Path) -> None:
    """Write Parquet under a temporary name and rename it, so ``file`` is never half written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    pq.write_table(table, partial, compression="zstd")
    partial.replace(file)


def read_rows(file: Path, iteration: int | None = None) -> list[dict[str, Any]]:
    """Read all rows of a Parquet table, or those of one iteration without that column."""
    if iteration is None:
        return pq.read_table(file).to_pylist()
    table = pq.read_table(file, filters=[("iteration", "=", iteration)])
    return table.drop_columns(["iteration"]).to_pylist()


def _add(columns: dict[str, list[Any]], **row: Any) -> None:
    for name, value in row.items():
        columns[name].append(value)

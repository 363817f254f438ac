"""Write and read trees, questions and other tables as Parquet files.

What environments with a state answered has a table of its own, ``steps.parquet``, and the tasks
that they start from a column ``data`` of the questions. Where there are none, neither is written.
The experts that a sampler has sent tokens to are in ``experts.parquet``, for mixtures of experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tasks.trees.tree import (
    CallResult,
    Decision,
    Message,
    Node,
    Observation,
    Question,
    Tree,
    results_of,
)

PORTION = 1024  # questions that are rows of Python at once
ROW_GROUP = 64 * PORTION  # questions of a row group
STORED_TREES = {  # stage -> environment variable: folder of trees that it uses and does not sample
    "reinforce": "BEAMLINE_TREES",  # of all iterations
    "reward_model": "BEAMLINE_LABELLED_TREES",
}
CALL_RESULT = pa.struct([(field.name, pa.string()) for field in fields(CallResult)])
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
DATA = pa.field("data", pa.string())  # the last column of questions for environments
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
        "policy_steps": pa.int32(),  # tables of earlier releases lack it, and are read as 0
        "results": pa.list_(CALL_RESULT),  # tables of earlier releases lack it: one call a turn
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
STEP_TABLE = pa.schema(  # Node.observation, of the nodes that have one
    {
        "question": pa.string(),
        "node": pa.int32(),
        "outcome": pa.string(),
        "text": pa.string(),
        "reward": pa.float64(),
        "terminated": pa.bool_(),
        "truncated": pa.bool_(),
        "state": pa.string(),  # null: the text with the actions is the key
        "actions": pa.list_(pa.string()),
        "info": pa.string(),  # a JSON object
    }
)
EXPERTS = "experts"  # name of the table below
EXPERT_TABLE = pa.schema(  # Node.experts, of the nodes that have some
    {
        "question": pa.string(),
        "node": pa.int32(),
        "routers": pa.int32(),
        "chosen": pa.int32(),  # experts of a router for one token
        "type": pa.string(),  # of numpy: uint8, or int16 for more than 256 experts
        "experts": pa.large_binary(),  # [tokens, routers, chosen] numbers
    }
)


def save_trees(trees: Sequence[Tree], folder: Path) -> None:
    """Write the tables of questions, nodes, leaves and decisions into ``folder``, and of steps."""
    nodes: dict[str, list[Any]] = {name: [] for name in NODE_TABLE.names}
    leaves: dict[str, list[Any]] = {name: [] for name in LEAF_TABLE.names}
    decisions: dict[str, list[Any]] = {name: [] for name in DECISION_TABLE.names}
    for tree in trees:
        for index, node in enumerate(tree.nodes):
            columns = {name: getattr(node, name) for name in NODE_TABLE.names[2:]}
            columns["results"] = [vars(result) for result in node.results]
            _add(nodes, question=tree.question.id, node=index, **columns)
        for index, leaf in enumerate(tree.leaves):
            _add(leaves, question=tree.question.id, leaf=index, node=leaf)
        for decision in tree.decisions:
            _add(decisions, question=tree.question.id, **vars(decision))
    save_questions([tree.question for tree in trees], folder / "questions.parquet")
    write_table(pa.table(nodes, schema=NODE_TABLE), folder / "nodes.parquet")
    write_table(pa.table(leaves, schema=LEAF_TABLE), folder / "leaves.parquet")
    write_table(pa.table(decisions, schema=DECISION_TABLE), folder / "decisions.parquet")
    if steps := list(_steps(trees)):
        write_table(pa.Table.from_pylist(steps, schema=STEP_TABLE), folder / "steps.parquet")
    if rows := list(_experts(trees)):
        file = folder / f"{EXPERTS}.parquet"
        write_table(pa.Table.from_pylist(rows, schema=EXPERT_TABLE), file)


def _steps(trees: Sequence[Tree]) -> Iterator[dict[str, Any]]:
    """Yield a row of ``STEP_TABLE`` for each node with an observation."""
    for tree in trees:
        for index, node in enumerate(tree.nodes):
            if node.observation:
                info = json.dumps(dict(node.observation.info), sort_keys=True)
                columns = {**vars(node.observation), "info": info}
                yield {"question": tree.question.id, "node": index, **columns}


def _experts(trees: Sequence[Tree]) -> Iterator[dict[str, Any]]:
    """Yield a row of ``EXPERT_TABLE`` for each node whose tokens were sent to experts."""
    for tree in trees:
        for index, node in enumerate(tree.nodes):
            if node.experts is not None:
                _, routers, chosen = node.experts.shape
                yield {
                    "question": tree.question.id,
                    "node": index,
                    "routers": routers,
                    "chosen": chosen,
                    "type": node.experts.dtype.name,
                    "experts": node.experts.tobytes(),
                }


def load_trees(folder: Path, iteration: int | None = None) -> list[Tree]:
    """Read the trees in ``folder`` in their order; with ``iteration`` those of that iteration.

    Tables of a whole run have a column ``iteration``; those of ``save_trees`` have none.
    """
    questions = load_questions(folder / "questions.parquet", iteration)
    trees = {question.id: Tree(question) for question in questions}
    observations = _load_observations(folder / "steps.parquet", iteration)
    experts = _load_experts(folder / f"{EXPERTS}.parquet", iteration)
    for row in read_rows(folder / "nodes.parquet", iteration):
        arrays: dict[str, Any] = {
            "tokens": np.array(row.pop("tokens"), np.int32),
            "logprobs": np.array(row.pop("logprobs"), np.float32),
            "entropies": np.array(row.pop("entropies"), np.float32),
        }
        name, node = row.pop("question"), row.pop("node")
        results = results_of(row.pop("results", None))
        arrays["experts"] = experts.get((name, node))
        observation = observations.get((name, node))
        trees[name].nodes.append(Node(**row, **arrays, observation=observation, results=results))
    for row in read_rows(folder / "leaves.parquet", iteration):
        trees[row["question"]].leaves.append(row["node"])
    for row in read_rows(folder / "decisions.parquet", iteration):
        trees[row.pop("question")].decisions.append(Decision(**row))
    return list(trees.values())


def _load_observations(file: Path, iteration: int | None) -> dict[tuple[str, int], Observation]:
    """Read (question, node) -> observation; {} where there is no such file."""
    observations = {}
    for row in read_rows(file, iteration) if file.is_file() else []:
        key = (row.pop("question"), row.pop("node"))
        parsed = {"actions": tuple(row["actions"]), "info": json.loads(row["info"])}
        observations[key] = Observation(**{**row, **parsed})
    return observations


def _load_experts(file: Path, iteration: int | None) -> dict[tuple[str, int], NDArray[Any]]:
    """Read (question, node) -> experts of its tokens; {} where there is no such file."""
    return {
        (row["question"], row["node"]): np.frombuffer(row["experts"], row["type"]).reshape(
            -1, row["routers"], row["chosen"]
        )
        for row in (read_rows(file, iteration) if file.is_file() else [])
    }


def save_questions(questions: Sequence[Question], file: Path) -> None:
    """Write a table with one row a question."""
    with_data = any(question.data for question in questions)
    schema = QUESTION_TABLE.append(DATA) if with_data else QUESTION_TABLE
    with _whole(file) as partial, pq.ParquetWriter(partial, schema, compression="zstd") as writer:
        remaining, written = iter(questions), 0
        while (group := _row_group(remaining, schema)) or not written:
            writer.write_table(group)
            written += 1


def _row_group(questions: Iterator[Question], schema: pa.Schema) -> pa.Table:
    """Return the next ``ROW_GROUP`` questions as a table of one piece."""
    parts = [pa.table({name: [] for name in schema.names}, schema=schema)]
    for _ in range(0, ROW_GROUP, PORTION):
        portion = list(islice(questions, PORTION))
        if not portion:
            break
        rows: dict[str, list[Any]] = {name: [] for name in schema.names}
        for question in portion:
            before = [vars(message) for message in question.before]
            values = {**vars(question), "before": before}
            _add(rows, **{name: values[name] for name in schema.names})
        parts.append(pa.table(rows, schema=schema))
    return pa.concat_tables(parts).combine_chunks()


def load_questions(file: Path, iteration: int | None = None) -> list[Question]:
    """Read the questions in ``file``; with ``iteration`` those of that iteration."""
    return [_question(row) for row in read_rows(file, iteration)]


def question_ids(file: Path) -> list[str]:
    """Read the ids of the questions in ``file``, in their order."""
    ids: list[str] = pq.read_table(file, columns=["id"])["id"].to_pylist()
    return ids


class StoredQuestions(Sequence[Question]):
    """The questions in ``file``, each made when it is asked for: a batch needs few of many."""

    def __init__(self, file: Path) -> None:
        self.table = pq.read_table(file)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        return _question(self.table.slice(range(len(self))[index], 1).to_pylist()[0])

    def __iter__(self) -> Iterator[Question]:
        return map(_question, self.table.to_pylist())


def _question(row: dict[str, Any]) -> Question:
    return Question(
        **{
            **row,
            "answers": tuple(row["answers"]),
            "before": tuple(Message(**message) for message in row["before"]),
            "data": row.get("data") or "",
        }
    )


def write_table(table: pa.Table, file: Path) -> None:
    """Write Parquet under a temporary name and rename it, so ``file`` is never half written."""
    with _whole(file) as partial:
        pq.write_table(table, partial, compression="zstd")


@contextmanager
def _whole(file: Path) -> Iterator[Path]:
    """Yield the temporary name of ``file``, and rename it at the end of the block."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    yield partial
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

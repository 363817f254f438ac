"""The nouns of the pipeline: question, observation of a tool, node, tree; and their tables.

A tree holds all rollouts of one question. Its root is the prompt; every other node is one turn of
the agent (sampled tokens) or one tool result (observed tokens). Branches share the nodes before
them, so a token that several trajectories share is stored once. A leaf is the last node of a
trajectory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

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
        "node": pa.int32(),
        "path": pa.int32(),
        "initial_entropy": pa.float64(),
        "entropy": pa.float64(),
        "probability": pa.float64(),
        "added": pa.int32(),
    }
)

PROMPT, TURN, RESULT = "prompt", "turn", "result"  # kinds of nodes
NO_SUCH_TOOL = "no_such_tool"  # the outcome of a call of a tool that is not at hand
STOP, END, LENGTH = "stop", "end", "length"  # sampling ended: a stop string, end token, budget


@dataclass(frozen=True)
class Message:
    """One message of a chat: who speaks ("system", "user", "assistant"), and what."""

    role: str
    content: str


@dataclass(frozen=True)
class Question:
    """One task for the agent.

    ``answers`` are the accepted forms of the gold answer, ``scorer`` the kind that compares an
    answer with them (tasks/scorers/). ``text`` is the user's message; a chat-formatted prompt has
    more messages ``before`` it.
    """

    id: str
    kind: str
    text: str
    answers: tuple[str, ...]
    scorer: str = "exact"
    before: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Document:
    """One entry of a corpus that the agent can search."""

    title: str
    text: str


@dataclass(frozen=True)
class Call:
    """A tool call: the tool's name and what the agent handed it."""

    tool: str
    argument: str


@dataclass(frozen=True)
class Observation:
    """What one tool call gave back: a named outcome ("ok", "error", ...) and its text."""

    outcome: str
    text: str


@dataclass(frozen=True)
class Node:
    """A run of tokens in a tree.

    tokens [T] int32; logprobs [T] and entropies [T] float32, of sampled nodes only (empty
    elsewhere): log-probabilities at the sampling temperature in nats, entropies divided by
    ln|V|, in [0, 1].
    """

    parent: int  # index in the tree; -1 for the prompt
    kind: str  # PROMPT, TURN or RESULT
    outcome: str  # how a turn ended, or what became of the tool call
    text: str
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    entropies: NDArray[np.float32]


@dataclass(frozen=True)
class Decision:
    """One branching decision (algorithms section 2), kept for audit and plots."""

    node: int  # the tool result that the branches start after
    path: int  # the trajectory that was judged
    initial_entropy: float
    entropy: float
    probability: float
    added: int  # branches that were started


@dataclass
class Tree:
    """All rollouts of one question; ``leaves[i]`` is the last node of trajectory i."""

    question: Question
    nodes: list[Node] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def path(self, leaf: int) -> list[int]:
        """Node indices from the root to ``leaf``, both included."""
        nodes = [leaf]
        while self.nodes[nodes[-1]].parent >= 0:
            nodes.append(self.nodes[nodes[-1]].parent)
        return nodes[::-1]

    def trajectories(self) -> Iterator[list[Node]]:
        """The nodes of each leaf's trajectory, prompt first, in leaf order."""
        for leaf in self.leaves:
            yield [self.nodes[node] for node in self.path(leaf)]


def response(trajectory: Sequence[Node]) -> str:
    """What follows the prompt, as text: turns and tool results."""
    return "".join(node.text for node in trajectory[1:])


def sampled(trajectory: Sequence[Node]) -> list[Node]:
    """The agent's own nodes of a trajectory."""
    return [node for node in trajectory if node.kind == TURN]


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


def load_trees(folder: Path) -> list[Tree]:
    """Read what ``save_trees`` wrote, in the same order."""
    questions = load_questions(folder / "questions.parquet")
    trees = {question.id: Tree(question) for question in questions}
    for row in read_rows(folder / "nodes.parquet"):
        arrays: dict[str, Any] = {
            "tokens": np.array(row.pop("tokens"), np.int32),
            "logprobs": np.array(row.pop("logprobs"), np.float32),
            "entropies": np.array(row.pop("entropies"), np.float32),
        }
        tree = trees[row.pop("question")]
        del row["node"]
        tree.nodes.append(Node(**row, **arrays))
    for row in read_rows(folder / "leaves.parquet"):
        trees[row["question"]].leaves.append(row["node"])
    for row in read_rows(folder / "decisions.parquet"):
        trees[row.pop("question")].decisions.append(Decision(**row))
    return list(trees.values())


def save_questions(questions: Sequence[Question], file: Path) -> None:
    """Write a table of questions, a row each."""
    rows: dict[str, list[Any]] = {name: [] for name in QUESTION_TABLE.names}
    for question in questions:
        before = [vars(message) for message in question.before]
        _add(rows, **{**vars(question), "before": before})
    write_table(pa.table(rows, schema=QUESTION_TABLE), file)


def load_questions(file: Path) -> list[Question]:
    """Read what ``save_questions`` wrote."""
    return [
        Question(
            **{
                **row,
                "answers": tuple(row["answers"]),
                "before": tuple(Message(**message) for message in row["before"]),
            }
        )
        for row in read_rows(file)
    ]


def write_table(table: pa.Table, file: Path) -> None:
    """Write Parquet under a temporary name, then rename, so the name never holds half a table."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    pq.write_table(table, partial, compression="zstd")
    partial.replace(file)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """All rows of a Parquet table."""
    return pq.read_table(file).to_pylist()


def _add(columns: dict[str, list[Any]], **row: Any) -> None:
    for name, value in row.items():
        columns[name].append(value)

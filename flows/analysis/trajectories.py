"""Read the trees of a run one after the other, with their rewards, in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flows.analysis import reading
from tasks.trees.tree import Message, Node, Observation, Question, Tree, results_of

AT_ONCE = 512  # rows of a table in memory
BUFFER = 2**16  # bytes of a column that are read at once
AGENTS = {"cold_start": "cold start", "trained": "trained", "champion": "champion"}
NODE = ["question", "parent", "kind", "outcome", "text", "tokens", "results"]

Row = dict[str, Any]


@dataclass(frozen=True)
class ScoredTree:
    """A tree with the rewards of its leaves, in leaf order, and where it is from."""

    place: Mapping[str, Any]  # {"iteration": 3} or {"agent": "trained"}
    tree: Tree
    rewards: list[Row]


def training(
    recipe: str, iterations: Collection[int] | None, project: Path
) -> Iterator[ScoredTree]:
    """Yield the trees of training. Raises ValueError where there are none, or for no iteration."""
    folder = project / "data" / recipe / "trees"
    if iterations is not None:
        numbers = _numbers(recipe, folder / "questions.parquet")
        if unknown := sorted(set(iterations) - numbers):
            raise ValueError(
                f"--iterations: {recipe} has no iteration {unknown[0]}; it has "
                f"{min(numbers)} to {max(numbers)}"
            )
    yield from _stream(recipe, folder, folder / "rewards.parquet", {}, iterations)


def evaluation(recipe: str, project: Path) -> Iterator[ScoredTree]:
    """Yield the trees of the evaluation, agent by agent; the ledger has them."""
    records = project / "data" / recipe / "records" / "evaluate.jsonl"
    if not records.is_file():
        raise reading.missing(recipe, records)
    every = [json.loads(line) for line in records.read_text().splitlines()]
    keys = {(each["stage"], each["verb"]): each["key"] for each in every}
    for folder in AGENTS:
        stage = f"evaluate/{folder}"
        if (stage, "rollout") not in keys:
            continue
        ledger = project / ".beamline" / "ledger" / recipe / stage
        trees, rewards = (
            ledger / f"0000-{verb}-{keys[stage, verb]}" for verb in ("rollout", "reward")
        )
        if not trees.is_dir():
            raise ValueError(
                f"{trees} is not in the ledger, which alone has the trajectories of an evaluation: "
                f"`dvc repro -f -s --no-run-cache evaluate@{recipe}` samples them again"
            )
        origin = {"agent": AGENTS[folder]}
        yield from _stream(recipe, trees / "trees", rewards / "rewards.parquet", origin, None)


def _numbers(recipe: str, file: Path) -> set[int]:
    if not file.is_file():
        raise reading.missing(recipe, file)
    return set(pc.unique(pq.read_table(file, columns=["iteration"])["iteration"]).to_pylist())


def _stream(
    recipe: str,
    folder: Path,
    rewards: Path,
    origin: Mapping[str, Any],
    iterations: Collection[int] | None,
) -> Iterator[ScoredTree]:
    """Yield the trees of a folder: its tables have equal orders, so they are read side by side."""
    files = [folder / f"{name}.parquet" for name in ("questions", "nodes", "leaves")]
    for file in [*files, rewards]:
        if not file.is_file():
            raise reading.missing(recipe, file)
    questions = _rows(files[0], None, iterations)
    nodes = _by_question(_rows(files[1], NODE, iterations))
    leaves = _by_question(_rows(files[2], ["question", "node"], iterations))
    scores = _by_question(_rows(rewards, None, iterations))
    seen = folder / "steps.parquet"
    steps = _by_question(_rows(seen, None, iterations)) if seen.is_file() else None
    for question, *tables in zip(questions, nodes, leaves, scores, strict=True):
        (_, grown), (_, ends), (_, scored) = tables
        where = (question.pop("iteration", None), question["id"])
        if any(key != where for key, _ in tables):
            raise ValueError(f"{folder}: its tables are not of one run: restore them together")
        observed = dict(_observation(row) for row in next(steps)[1]) if steps else {}
        tree = Tree(_question(question), leaves=[row["node"] for row in ends])
        tree.nodes += [_node(row, observed.get(index)) for index, row in enumerate(grown)]
        tree_origin = origin or {"iteration": where[0]}
        yield ScoredTree(tree_origin, tree, scored)


def _rows(
    file: Path, columns: list[str] | None, iterations: Collection[int] | None
) -> Iterator[Row]:
    """Yield the rows of a table, or those of some iterations, a few at a time."""
    table = pq.ParquetFile(file, buffer_size=BUFFER)
    # tables of earlier releases lack some
    wanted = ["iteration", *(columns or table.schema_arrow.names)]
    names = [name for name in table.schema_arrow.names if name in wanted]
    for batch in table.iter_batches(AT_ONCE, columns=names):
        if iterations is not None:
            mask = [value in iterations for value in batch["iteration"].to_pylist()]
            batch = batch.filter(mask)
        yield from batch.to_pylist()


def _by_question(rows: Iterator[Row]) -> Iterator[tuple[tuple[int | None, str], list[Row]]]:
    for key, group in groupby(rows, lambda row: (row.get("iteration"), row["question"])):
        yield key, list(group)


def _question(row: Row) -> Question:
    before = tuple(Message(**message) for message in row["before"])
    fields = {
        **row,
        "answers": tuple(row["answers"]),
        "before": before,
        "data": row.get("data") or "",
    }
    return Question(**fields)


def _node(row: Row, observation: Observation | None) -> Node:
    """Return a node without what messages do not need."""
    none = np.zeros(0, np.float32)
    fields = {name: row[name] for name in ("parent", "kind", "outcome", "text")}
    tokens = np.array(row["tokens"], np.int32)
    results = results_of(row.get("results"))
    return Node(
        **fields,
        tokens=tokens,
        logprobs=none,
        entropies=none,
        observation=observation,
        results=results,
    )


def _observation(row: Row) -> tuple[int, Observation]:
    fields = {name: value for name, value in row.items() if name not in ("iteration", "question")}
    node = fields.pop("node")
    fields |= {"actions": tuple(fields["actions"]), "info": json.loads(fields["info"])}
    return node, Observation(**fields)

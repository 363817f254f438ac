"""collect: the trees of all iterations as one table each, through the gate and out of the stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from prefect import task
from prefect.cache_policies import NO_CACHE

from params.schema import Dialogue, Reinforce
from tasks import dialogue as talk
from tasks import gate, ledger
from tasks.expectations import trajectories as trajectory_gate
from tasks.ledger import Record
from tasks.trajectory import load_trees, read_rows, response, sampled, write_table

Iteration = Mapping[str, Record]  # verb -> its record
TABLES = ("questions", "nodes", "leaves", "decisions")
CURVE = ("reward", "rollout", "advantage", "update")  # whose metrics make up the learning curve


@task(cache_policy=NO_CACHE)
def collect(
    *, recipe: str, settings: Reinforce, dialogue: Dialogue, done: Sequence[Iteration]
) -> None:
    """Write ``data/<recipe>/trees``, ``curve.csv`` and ``gates/reinforce``.

    Raises GateError where the trajectories break a critical expectation; then no out is written
    but the verdict.
    """
    data = Path("data", recipe)
    table = pd.DataFrame(
        [row for number, entry in enumerate(done) for row in _leaves(number, entry)]
    )
    gate.check(
        "trajectories",
        trajectory_gate.prepare(table, set(talk.OUTCOMES) - {talk.ANSWER}),
        trajectory_gate.expectations(
            leaves=settings.rollout.leaves,
            outcomes=set(talk.OUTCOMES),
            reward=settings.reward.range(),
            response_tokens=dialogue.response_tokens,
            tool_calls=dialogue.tool_calls,
        ),
        data / "gates" / "reinforce" / "trajectories.json",
        gate.DOCS / recipe / "trajectories",
    )
    for name in TABLES:
        _join(done, "rollout", f"trees/{name}.parquet", data / "trees" / f"{name}.parquet")
    _join(done, "reward", "rewards.parquet", data / "trees" / "rewards.parquet")
    _join(done, "advantage", "advantages.parquet", data / "trees" / "advantages.parquet")
    curve = pd.DataFrame([_point(number, iteration) for number, iteration in enumerate(done)])
    partial = data / ".curve.csv.partial"
    curve.to_csv(partial, index=False, float_format="%.6g")
    partial.rename(data / "curve.csv")


def _point(number: int, iteration: Iteration) -> dict[str, float]:
    """One row of the learning curve: metrics only, since seconds differ between equal runs."""
    metrics = [iteration[verb]["metrics"] for verb in CURVE]
    return {"iteration": number, **{k: v for entry in metrics for k, v in entry.items()}}


def _join(done: Sequence[Iteration], verb: str, file: str, target: Path) -> None:
    """The tables that ``verb`` wrote, one below the other, with the iteration as first column."""
    tables = []
    for number, iteration in enumerate(done):
        made = Path(next(iter(iteration[verb]["artifacts"].values()))["path"])
        table = pq.read_table(made.parent / file)
        tables.append(table.add_column(0, "iteration", pa.array([number] * len(table), pa.int32())))
    write_table(pa.concat_tables(tables), target)


def _leaves(number: int, iteration: Iteration) -> list[dict[str, Any]]:
    """A row a leaf, as the gate of the trajectories wants it."""
    trees = load_trees(Path(ledger.of(iteration["rollout"], "trees").path))
    rewards = read_rows(Path(ledger.of(iteration["reward"], "rewards").path))
    advantages = read_rows(Path(ledger.of(iteration["advantage"], "advantages").path))
    scored = {(row["question"], row["leaf"]): row for row in rewards}
    credit = {(row["question"], row["leaf"]): row["advantage"] for row in advantages}
    rows = []
    for tree in trees:
        for leaf, trajectory in enumerate(tree.trajectories()):
            score = scored[tree.question.id, leaf]
            own = sampled(trajectory)
            rows.append(
                {
                    "iteration": number,
                    "question_id": tree.question.id,
                    "leaf": leaf,
                    "outcome": score["outcome"],
                    "text": response(trajectory),
                    "success": score["success"],
                    "reward": score["reward"],
                    "advantage": credit[tree.question.id, leaf],
                    "tool_calls": score["tool_calls"],
                    "sampled_tokens": score["sampled_tokens"],
                    "observed_tokens": score["response_tokens"] - score["sampled_tokens"],
                    "logprob_count": sum(len(node.logprobs) for node in own),
                    "highest_logprob": max(float(node.logprobs.max()) for node in own),
                    "lowest_entropy": min(float(node.entropies.min()) for node in own),
                    "highest_entropy": max(float(node.entropies.max()) for node in own),
                }
            )
    return rows

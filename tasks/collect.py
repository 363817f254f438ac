"""collect: the trees of all iterations as one table each, through the gate and out of the stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from params.schema.agent import Dialogue
from params.schema.algorithms import Algorithm
from params.schema.reinforce import RewardPart
from tasks.chat import teacher_scores
from tasks.chat.teacher_scores import SCORES
from tasks.gates import advantages as advantage_gate
from tasks.gates import gate
from tasks.gates import rewards as reward_gate
from tasks.gates import trajectories as trajectory_gate
from tasks.learning.algorithm import CENTRED
from tasks.ledger import artifacts, substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.rewards import judging, reward_parts, scoring
from tasks.scorers import scorer_fault
from tasks.tools import recording
from tasks.trees import validation
from tasks.trees.metrics import together
from tasks.trees.outcomes import TURN_OUTCOMES, Outcome
from tasks.trees.tables import EXPERTS, load_trees, write_table
from tasks.trees.tree import RESULT, Node, acts, response, sampled

Checked = tuple[pd.DataFrame, Sequence[gate.Expectation]]  # a prepared table, what it has to be
Iteration = Mapping[str, Sequence[Artifact]]  # TABLES: name -> those of its batches
Metrics = Mapping[str, Sequence[Mapping[str, float]]]  # CURVE: verb -> those of its batches
TREES = ("questions", "nodes", "leaves", "decisions")
STEPS = "steps"  # of trees; only environments with a state have it
TABLES = {  # of an iteration: name -> the verbs that make it; not each is made in every run
    "trees": ("carry", "rollout"),
    "estimates": ("estimate",),
    "rewards": ("carry", "reward"),
    "parts": ("carry", "reward"),
    "verdicts": ("reward",),
    "advantages": ("advantage",),
    "teacher": ("advantage",),
    "tokens": ("update",),
}
FINISHED = {Outcome.ANSWER, Outcome.TERMINATED, Outcome.TRUNCATED}  # no failed rollouts
CURVE = ("reward", "rollout", "advantage", "update")  # whose metrics make up the learning curve


@dataclass(frozen=True)
class CollectInputs:
    """What decides the verdicts and the curve, and the tables that are published with them."""

    leaves: int  # of a question
    reward: Sequence[RewardPart]
    algorithm: Algorithm
    dialogue: Dialogue
    tables: Sequence[Iteration]
    metrics: Sequence[Metrics]
    # Rewards of the policies that were asked the validation questions, by the iterations that each
    # had learned from.
    validation: Mapping[int, Artifact]


@substeps.recorded
def collect(step: SubStep, inputs: CollectInputs) -> Record:
    """Check the tables of all iterations; artifacts ``gates``, the verdicts, and ``curve``.

    The tables are no artifacts: the ledger has their parts, and ``publish_collected`` joins them.
    Raises GateError where the trajectories, rewards or advantages break a critical expectation.
    """
    _check(inputs, step.out / "gates", gate.DOCS / step.recipe)
    curve = curve_of(inputs, step.seed)
    curve.to_csv(step.out / "curve.csv", index=False, float_format="%.6g")
    return {}


def publish_collected(inputs: CollectInputs, collected: Record, data: Path) -> None:
    """Write ``trees``, ``gates/reinforce`` and ``curve.csv`` into ``data``, from what passed."""
    tables, trees = inputs.tables, data / "trees"
    artifacts.publish(artifacts.output(collected, "gates"), data / "gates" / "reinforce")
    for name, table in joined(tables).items():
        write_table(table, trees / f"{name}.parquet")
    if calls := _recorded_calls(tables):
        recording.publish_calls(calls, trees / recording.CALLS)
    judging.publish_verdicts(_files(tables, "verdicts"), trees / judging.VERDICTS)
    teacher_scores.publish(_files(tables, "teacher"), trees / SCORES)
    if not reward_parts.is_default(inputs.reward):  # else the reward's row tells them
        write_table(_join(tables, "parts"), trees / "parts.parquet")
    artifacts.publish(artifacts.output(collected, "curve"), data / "curve.csv")


def joined(tables: Sequence[Iteration]) -> dict[str, pa.Table]:
    """Return the tables of the trees of all iterations, and of what they were trained with.

    An iteration without tables has no rows in them.
    """
    by_name = {name: _join(tables, "trees", f"{name}.parquet") for name in TREES}
    for name in (STEPS, EXPERTS):
        if some := _tables(tables, "trees", f"{name}.parquet"):
            by_name[name] = pa.concat_tables(some)
    trained = {name: _join(tables, name) for name in ("advantages", "tokens")}
    return {**by_name, "rewards": _rewards(tables), **trained}


def _check(inputs: CollectInputs, verdicts: Path, docs: Path) -> None:
    """Run the gates of all iterations' tables, in the order in which they are made."""
    trajectories = _trajectories(inputs.tables)
    whole = pd.MultiIndex.from_frame(trajectories[["iteration", "question_id", "leaf"]])
    rewards = _rewards(inputs.tables).to_pandas()
    of_parts = _join(inputs.tables, "parts").to_pandas()
    advantages = _join(inputs.tables, "advantages").to_pandas()
    tables = {
        "trajectories": _of_trajectories(inputs, trajectories),
        "rewards": _of_rewards(inputs, whole, rewards, of_parts),
        "advantages": _of_advantages(inputs, rewards, advantages),
    }
    for name, (table, expectations) in tables.items():
        gate.check(name, table, expectations, verdicts / f"{name}.json", docs / name)


def _of_trajectories(inputs: CollectInputs, trajectories: pd.DataFrame) -> Checked:
    outcomes = set(TURN_OUTCOMES)
    expectations = trajectory_gate.expectations(
        leaves=inputs.leaves,
        outcomes=outcomes,
        response_tokens=inputs.dialogue.response_tokens,
        tool_calls=inputs.dialogue.tool_calls,
    )
    return trajectory_gate.prepare(trajectories, outcomes - FINISHED), expectations


def _of_rewards(
    inputs: CollectInputs, whole: pd.MultiIndex, rewards: pd.DataFrame, of_parts: pd.DataFrame
) -> Checked:
    broken, silent = reward_parts.broken_format(inputs.reward), reward_parts.silent(inputs.reward)
    expectations = reward_gate.expectations(
        rows=len(whole),
        leaves=inputs.leaves,
        outcomes=set(TURN_OUTCOMES),
        scorers=[name for name in rewards["scorer"].unique() if _is_known(name)],
        reward=reward_parts.reward_range(inputs.reward),
    )
    return reward_gate.prepare(rewards, whole, of_parts, broken, silent), expectations


def _of_advantages(
    inputs: CollectInputs, rewards: pd.DataFrame, advantages: pd.DataFrame
) -> Checked:
    shaped = rewards.assign(reward=rewards["reward"] + rewards["length_penalty"])
    # equal rewards then differ by it
    by_token = inputs.algorithm.kl_in("reward") or inputs.algorithm.teacher is not None
    expectations = advantage_gate.expectations(
        rows=len(rewards),
        leaves=inputs.leaves,
        centred=inputs.algorithm.estimator.kind in CENTRED and not by_token,
    )
    return advantage_gate.prepare(advantages, shaped), expectations


def _is_known(scorer: Any) -> bool:
    """Return whether a leaf can have been scored by this."""
    return scorer == scoring.WORLD or (isinstance(scorer, str) and not scorer_fault(scorer))


def curve_of(inputs: CollectInputs, seed: int) -> pd.DataFrame:
    """Return a row an iteration: training metrics, and validation of the policy that sampled it.

    The policy that the last iteration made has a row of its own, without training metrics.
    """
    curve = pd.DataFrame([_point(number, metrics) for number, metrics in enumerate(inputs.metrics)])
    if not inputs.validation:
        return curve
    validations = [validation.answered(*each) for each in inputs.validation.items()]
    rows = pd.DataFrame(validation.points(validations, seed)).set_index("iteration")
    of_policies = rows.add_prefix("validation_")
    return curve.merge(of_policies, how="outer", left_on="iteration", right_index=True)


def _point(number: int, metrics: Metrics) -> dict[str, float]:
    """Return a row of the learning curve; metrics only, since seconds differ in equal runs."""
    joined = [together(metrics[verb]) for verb in CURVE]
    return {"iteration": number, **{k: v for entry in joined for k, v in entry.items()}}


def _join(tables: Sequence[Iteration], name: str, file: str = "") -> pa.Table:
    """Join the tables of a name, or a file in them. Columns that some lack are null there."""
    return pa.concat_tables(_tables(tables, name, file), promote_options="default")


def _rewards(tables: Sequence[Iteration]) -> pa.Table:
    """Return the rewards, with the reward model's estimate of each leaf; null without one."""
    rewards = _join(tables, "rewards")
    rows: list[dict[str, Any]] = []
    if all(iteration.get("estimates") for iteration in tables):
        rows = _join(tables, "estimates").to_pylist()
    estimates = {(row["iteration"], row["question"], row["leaf"]): row["estimate"] for row in rows}
    leaves = zip(*(rewards[name].to_pylist() for name in reward_gate.LEAF), strict=True)
    return rewards.append_column("estimate", pa.array(map(estimates.get, leaves), pa.float64()))


def _tables(tables: Sequence[Iteration], name: str, file: str = "") -> list[pa.Table]:
    """Read the tables of a name, or a file in them, with the iteration as first column.

    Trees without steps, or without experts, are left out.
    """
    numbered_tables = []
    for number, artifact in [
        (i, artifact) for i, entry in enumerate(tables) for artifact in entry.get(name, ())
    ]:
        written = Path(artifact.path, file)
        if written.is_file() or written.stem not in (STEPS, EXPERTS):
            table = pq.read_table(written)
            numbers = pa.array([number] * len(table), pa.int32())
            numbered_tables.append(table.add_column(0, "iteration", numbers))
    return numbered_tables


def _recorded_calls(tables: Sequence[Iteration]) -> dict[recording.Origin, Path]:
    """Return the tables of recorded results, where tools are not repeatable."""
    files = {
        recording.Origin("reinforce", number, attempt): Path(artifact.path, recording.CALLS)
        for number, iteration in enumerate(tables)
        for attempt, artifact in enumerate(iteration["trees"])
    }
    return {origin: file for origin, file in files.items() if file.exists()}


def _files(tables: Sequence[Iteration], name: str) -> list[Path]:
    """Return the tables of a name that some iterations have, such as a judge's verdicts."""
    return [Path(artifact.path) for each in tables for artifact in each.get(name, ())]


def _trajectories(tables: Sequence[Iteration]) -> pd.DataFrame:
    """Return a row a leaf of all iterations."""
    return pd.DataFrame(
        [row for number, entry in enumerate(tables) for row in _leaves(number, entry)]
    )


def _leaves(number: int, iteration: Iteration) -> list[dict[str, Any]]:
    """Return a row a leaf of one iteration, as the gate of trajectories reads it."""
    return [
        {
            "iteration": number,
            "question_id": tree.question.id,
            "leaf": leaf,
            **_measures(trajectory),
        }
        for artifact in iteration["trees"]
        for tree in load_trees(Path(artifact.path))
        for leaf, trajectory in enumerate(tree.trajectories())
    ]


def _measures(trajectory: Sequence[Node]) -> dict[str, Any]:
    """Return what the gate checks of a trajectory; extremes of no tokens are infinite."""
    sampled_nodes = sampled(trajectory)
    logprobs = np.concatenate([np.empty(0), *(node.logprobs for node in sampled_nodes)])
    entropies = np.concatenate([np.empty(0), *(node.entropies for node in sampled_nodes)])
    return {
        "outcome": trajectory[-1].outcome,
        "text": response(trajectory),
        "tool_calls": len(acts(trajectory)),
        "sampled_tokens": sum(len(node.tokens) for node in sampled_nodes),
        "observed_tokens": sum(len(node.tokens) for node in trajectory if node.kind == RESULT),
        "logprob_count": len(logprobs),
        "highest_logprob": logprobs.max(initial=-np.inf),
        "lowest_entropy": entropies.min(initial=np.inf),
        "highest_entropy": entropies.max(initial=-np.inf),
    }

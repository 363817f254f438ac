"""collect: the trees of all iterations as one table each, through the gate and out of the stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from prefect import task
from prefect.cache_policies import NO_CACHE

from params.schema.agent import Dialogue
from params.schema.algorithms import Algorithm
from params.schema.reinforce import Reinforce
from tasks.gates import advantages as advantage_gate
from tasks.gates import gate
from tasks.gates import rewards as reward_gate
from tasks.gates import trajectories as trajectory_gate
from tasks.learning.algorithm import CENTRED
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Record
from tasks.rewards import judging, parts, scoring
from tasks.scorers import scorer_fault
from tasks.tools import recording
from tasks.trees import validation
from tasks.trees.metrics import together
from tasks.trees.outcomes import TURN_OUTCOMES, Outcome
from tasks.trees.tables import load_trees, write_table
from tasks.trees.tree import RESULT, Node, acts, response, sampled

Checked = tuple[pd.DataFrame, Sequence[gate.Expectation]]  # a prepared table, what it has to be
Iteration = Mapping[str, Sequence[Record]]  # verb -> its records; several where groups are filtered
TABLES = ("questions", "nodes", "leaves", "decisions")
STEPS = "trees/steps.parquet"  # only environments with a state have it
FINISHED = {Outcome.ANSWER, Outcome.TERMINATED, Outcome.TRUNCATED}  # no failed rollouts
CURVE = ("reward", "rollout", "advantage", "update")  # whose metrics make up the learning curve


@task(cache_policy=NO_CACHE)
def collect(
    *,
    recipe: str,
    settings: Reinforce,
    algorithm: Algorithm,
    dialogue: Dialogue,
    done: Sequence[Iteration],
) -> None:
    """Write ``data/<recipe>/trees``, ``curve.csv`` and ``gates/reinforce``.

    Raises GateError where the trajectories, rewards or advantages break a critical expectation;
    then no out is written but the verdicts so far.
    """
    data = Path("data", recipe)
    rewards = _with_estimates(_join(done, "reward", "rewards.parquet"), done)
    of_parts = _join(done, "reward", "parts.parquet")
    advantages = _join(done, "advantage", "advantages.parquet")
    trajectories = _trajectories(done)
    _check(recipe, settings, algorithm, dialogue, trajectories, rewards, of_parts, advantages)
    for file in (f"trees/{name}.parquet" for name in TABLES):
        write_table(_join(done, "rollout", file), data / file)
    if steps := _tables(done, "rollout", STEPS):
        write_table(pa.concat_tables(steps), data / STEPS)
    if calls := _recorded_calls(done):
        recording.publish_calls(calls, data / "trees" / recording.CALLS)
    judging.publish_verdicts(_verdicts(done), data / "trees" / judging.VERDICTS)
    write_table(rewards, data / "trees" / "rewards.parquet")
    if not parts.is_default(settings.reward):  # else the reward's row tells them
        write_table(of_parts, data / "trees" / "parts.parquet")
    write_table(advantages, data / "trees" / "advantages.parquet")
    write_table(_join(done, "update", "tokens.parquet"), data / "trees" / "tokens.parquet")
    curve = _curve(done)
    partial = data / ".curve.csv.partial"
    curve.to_csv(partial, index=False, float_format="%.6g")
    partial.rename(data / "curve.csv")


def _check(
    recipe: str,
    settings: Reinforce,
    algorithm: Algorithm,
    dialogue: Dialogue,
    trajectories: pd.DataFrame,
    rewards: pa.Table,
    of_parts: pa.Table,
    advantages: pa.Table,
) -> None:
    """Run the gates of an iteration's tables, in the order in which they are made."""
    whole = pd.MultiIndex.from_frame(trajectories[["iteration", "question_id", "leaf"]])
    rewarded = rewards.to_pandas()
    tables = {
        "trajectories": _of_trajectories(settings, dialogue, trajectories),
        "rewards": _of_rewards(settings, whole, rewarded, of_parts.to_pandas()),
        "advantages": _of_advantages(settings, algorithm, rewarded, advantages.to_pandas()),
    }
    verdicts = Path("data", recipe, "gates", "reinforce")
    for name, (table, expectations) in tables.items():
        gate.check(name, table, expectations, verdicts / f"{name}.json", gate.DOCS / recipe / name)


def _of_trajectories(
    settings: Reinforce, dialogue: Dialogue, trajectories: pd.DataFrame
) -> Checked:
    outcomes = set(TURN_OUTCOMES)
    expectations = trajectory_gate.expectations(
        leaves=settings.rollout.leaves,
        outcomes=outcomes,
        response_tokens=dialogue.response_tokens,
        tool_calls=dialogue.tool_calls,
    )
    return trajectory_gate.prepare(trajectories, outcomes - FINISHED), expectations


def _of_rewards(
    settings: Reinforce, whole: pd.MultiIndex, rewards: pd.DataFrame, of_parts: pd.DataFrame
) -> Checked:
    broken, silent = parts.broken_format(settings.reward), parts.silent(settings.reward)
    expectations = reward_gate.expectations(
        rows=len(whole),
        leaves=settings.rollout.leaves,
        outcomes=set(TURN_OUTCOMES),
        scorers=[name for name in rewards["scorer"].unique() if _is_known(name)],
        reward=parts.reward_range(settings.reward),
    )
    return reward_gate.prepare(rewards, whole, of_parts, broken, silent), expectations


def _of_advantages(
    settings: Reinforce, algorithm: Algorithm, rewards: pd.DataFrame, advantages: pd.DataFrame
) -> Checked:
    shaped = rewards.assign(reward=rewards["reward"] + rewards["length_penalty"])
    in_reward = algorithm.kl_in("reward")  # equal rewards then differ by it
    expectations = advantage_gate.expectations(
        rows=len(rewards),
        leaves=settings.rollout.leaves,
        centred=algorithm.estimator.kind in CENTRED and not in_reward,
    )
    return advantage_gate.prepare(advantages, shaped), expectations


def _is_known(scorer: Any) -> bool:
    """Return whether a leaf can have been scored by this."""
    return scorer == scoring.WORLD or (isinstance(scorer, str) and not scorer_fault(scorer))


def _curve(done: Sequence[Iteration]) -> pd.DataFrame:
    """Return a row an iteration: training metrics, and validation of the policy that sampled it.

    The policy that the last iteration made has a row of its own, without training metrics.
    """
    curve = pd.DataFrame([_point(number, iteration) for number, iteration in enumerate(done)])
    exams = [record for iteration in done for record in iteration.get("validation", ())]
    if not exams:
        return curve
    rows = validation.points(validation.validated(exams), exams[0]["step"]["seed"])
    asked = pd.DataFrame(rows).set_index("iteration").add_prefix("validation_")
    return curve.merge(asked, how="outer", left_on="iteration", right_index=True)


def _point(number: int, iteration: Iteration) -> dict[str, float]:
    """Return a row of the learning curve; metrics only, since seconds differ in equal runs."""
    metrics = [together([record["metrics"] for record in iteration[verb]]) for verb in CURVE]
    return {"iteration": number, **{k: v for entry in metrics for k, v in entry.items()}}


def _join(done: Sequence[Iteration], verb: str, file: str) -> pa.Table:
    """Join the tables that ``verb`` wrote. Columns that some lack are null there."""
    return pa.concat_tables(_tables(done, verb, file), promote_options="default")


def _with_estimates(rewards: pa.Table, done: Sequence[Iteration]) -> pa.Table:
    """Add the reward model's estimate of each leaf, the column ``estimate``; null without one."""
    rows: list[dict[str, Any]] = []
    if all("estimate" in iteration for iteration in done):
        rows = _join(done, "estimate", "estimates.parquet").to_pylist()
    found = {(row["iteration"], row["question"], row["leaf"]): row["estimate"] for row in rows}
    leaves = zip(*(rewards[name].to_pylist() for name in reward_gate.LEAF), strict=True)
    return rewards.append_column("estimate", pa.array(map(found.get, leaves), pa.float64()))


def _tables(done: Sequence[Iteration], verb: str, file: str) -> list[pa.Table]:
    """Read the tables that ``verb`` wrote, where it did, with the iteration as first column."""
    tables = []
    for number, record in [(i, record) for i, entry in enumerate(done) for record in entry[verb]]:
        written = Path(next(iter(record["artifacts"].values()))["path"]).parent / file
        if written.is_file() or file != STEPS:
            table = pq.read_table(written)
            numbers = pa.array([number] * len(table), pa.int32())
            tables.append(table.add_column(0, "iteration", numbers))
    return tables


def _recorded_calls(done: Sequence[Iteration]) -> dict[recording.Origin, Path]:
    """Return the tables of recorded results, where tools are not repeatable."""
    found = {
        recording.Origin("reinforce", number, attempt): Path(
            artifacts.output(record, "trees").path, recording.CALLS
        )
        for number, iteration in enumerate(done)
        for attempt, record in enumerate(iteration["rollout"])
    }
    return {origin: file for origin, file in found.items() if file.exists()}


def _verdicts(done: Sequence[Iteration]) -> list[Path]:
    """Return where the tables of a judge's verdicts are; they exist where a judge was asked."""
    rewards = [artifacts.output(one, "rewards") for each in done for one in each["reward"]]
    return [Path(made.path).with_name(judging.VERDICTS) for made in rewards]


def _trajectories(done: Sequence[Iteration]) -> pd.DataFrame:
    """Return a row a leaf of all iterations."""
    return pd.DataFrame(
        [row for number, entry in enumerate(done) for row in _leaves(number, entry)]
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
        for record in iteration["rollout"]
        for tree in load_trees(Path(artifacts.output(record, "trees").path))
        for leaf, trajectory in enumerate(tree.trajectories())
    ]


def _measures(trajectory: Sequence[Node]) -> dict[str, Any]:
    """Return what the gate checks of a trajectory; extremes of no tokens are infinite."""
    own = sampled(trajectory)
    logprobs = np.concatenate([np.empty(0), *(node.logprobs for node in own)])
    entropies = np.concatenate([np.empty(0), *(node.entropies for node in own)])
    return {
        "outcome": trajectory[-1].outcome,
        "text": response(trajectory),
        "tool_calls": len(acts(trajectory)),
        "sampled_tokens": sum(len(node.tokens) for node in own),
        "observed_tokens": sum(len(node.tokens) for node in trajectory if node.kind == RESULT),
        "logprob_count": len(logprobs),
        "highest_logprob": logprobs.max(initial=-np.inf),
        "lowest_entropy": entropies.min(initial=np.inf),
        "highest_entropy": entropies.max(initial=-np.inf),
    }

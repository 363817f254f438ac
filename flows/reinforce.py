"""Reinforcement learning, as in Algorithm 1 of ARPO (arXiv 2507.19849).

For each iteration: take a batch of questions, keep the policy that samples, roll out with beaming,
score the leaves, estimate advantages, update the policy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import flow

from flows import stage
from params import schema
from params.schema import Recipe
from tasks import figures, ledger, track
from tasks.advantage import advantage
from tasks.algorithm import Row, assemble, read_row
from tasks.collect import collect
from tasks.ledger import Artifact, Record, Step
from tasks.policy import use_machine
from tasks.progress import Progress
from tasks.reward import reward
from tasks.rollout import Respond, open_tools, rollout
from tasks.update import update

Iteration = Mapping[str, Record]  # verb -> what it left in the ledger


@flow(name="reinforce")
def reinforce(recipe: str) -> None:
    """Make ``models/<recipe>/trained`` of ``models/<recipe>/cold_start``; keep all trees."""
    chosen = schema.load(recipe, Path("params"))
    settings = chosen.reinforce
    row = read_row(settings.algorithm)
    questions = ledger.artifact(Path("data", recipe, "questions", "train.parquet"))
    policy = ledger.artifact(Path("models", recipe, "cold_start"))
    use_machine(chosen.machine)
    done: list[Iteration] = []
    costs: list[dict[str, float]] = []  # seconds by part, of the iterations that took any now
    progress = Progress("reinforce", settings.iterations)
    key = ledger.stage_key(chosen, questions, policy)
    with (
        track.stage(recipe, "reinforce", key, stage.run_tags()) as run,
        open_tools(chosen) as tools,
    ):
        for number in range(settings.iterations):
            began = time.time()
            step = Step(recipe, "reinforce", number, chosen.seed)
            done.append(iterate(step, chosen, row, policy, questions, tools))
            policy = ledger.of(done[-1]["update"], "policy")
            ledger.retire(step, "update", settings.keep_checkpoints)
            costs += report(run, progress, done[-1], began)
        progress.close()
        collect(recipe=recipe, settings=settings, dialogue=chosen.dialogue, done=done)
        ledger.publish(policy, Path("models", recipe, "trained"))
        picture(run, done)
        account(run, costs)


def iterate(
    step: Step, recipe: Recipe, row: Row, policy: Artifact, questions: Artifact, tools: Respond
) -> Iteration:
    """One iteration: roll out with ``policy``, reward, credit, update."""
    settings = recipe.reinforce
    rolled_out = rollout(
        step=step,
        policy=policy,
        questions=questions,
        size=settings.questions,
        budget=assemble(row).budget(settings.rollout),
        top_p=1.0,
        dialogue=recipe.dialogue,
        machine=recipe.machine,
        limits=recipe.python,
        tools=tools,
    )
    trees = ledger.of(rolled_out, "trees")
    rewarded = reward(step=step, trees=trees, settings=settings.reward)
    credited = advantage(step=step, rewards=ledger.of(rewarded, "rewards"), row=row)
    updated = update(
        step=step,
        policy=policy,
        trees=trees,
        advantages=ledger.of(credited, "advantages"),
        row=row,
        settings=settings.update,
        temperature=settings.rollout.temperature,
        machine=recipe.machine,
    )
    return {"rollout": rolled_out, "reward": rewarded, "advantage": credited, "update": updated}


def report(
    run: track.Run, progress: Progress, iteration: Iteration, began: float
) -> list[dict[str, float]]:
    """Show one iteration in the terminal and in MLflow; the seconds of its parts.

    An iteration that the ledger remembers took no time now and has no seconds.
    """
    records = list(iteration.values())
    metrics = {name: value for record in records for name, value in record["metrics"].items()}
    progress.note(reward=metrics["reward"], success=metrics["success"])
    progress.advance(1)
    number = records[0]["step"]["iteration"]
    finished = records[-1]["finished"]
    parts = seconds(iteration)
    speeds = {
        "sampled_tokens_a_second": metrics["sampled_tokens"] / parts["sampling"],
        "trained_tokens_a_second": metrics["trained_tokens"] / parts["update"],
    }
    tracked = time.time()
    run.metrics({**metrics, **speeds}, step=number, at=finished)
    if finished < began:
        return []
    now = time.time()
    tracking = now - tracked
    cost = {**parts, "tracking": tracking, "orchestration": now - began - tracking}
    cost["orchestration"] -= sum(parts.values())
    run.metrics(
        {f"seconds_{name}": value for name, value in cost.items()}, step=number, at=finished
    )
    return [cost]


def seconds(iteration: Iteration) -> dict[str, float]:
    """Seconds of the parts of one iteration, as its sub-steps measured them."""
    return {
        name: value for record in iteration.values() for name, value in record["seconds"].items()
    }


def picture(run: track.Run, done: Sequence[Iteration]) -> None:
    """Figures of the whole run: the learning curve, and entropy around tool results."""
    curve: list[dict[str, Any]] = [
        {"iteration": number, **iteration["reward"]["metrics"]}
        for number, iteration in enumerate(done)
    ]
    run.figure(figures.learning_curve(curve), "learning_curve.png")
    profile = [
        {"iteration": number, **point}
        for number, iteration in enumerate(done)
        for point in iteration["rollout"]["profile"]
    ]
    if profile:
        run.figure(figures.entropy_around_tools(profile), "entropy_around_tools.png")


def account(run: track.Run, costs: Sequence[Mapping[str, float]]) -> None:
    """Where the time of an iteration went: printed, and drawn in MLflow."""
    if not costs:
        return
    mean = {name: sum(cost[name] for cost in costs) / len(costs) for name in costs[0]}
    whole = sum(mean.values())
    print(f"seconds of one iteration, mean of {len(costs)}: {whole:.2f}")
    for name, value in sorted(mean.items(), key=lambda part: -part[1]):
        print(f"  {name:<14}{value:7.3f} {value / whole:6.1%}")
    run.figure(figures.seconds_by_part(mean), "seconds_by_part.png")


if __name__ == "__main__":
    stage.main(reinforce)

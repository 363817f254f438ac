"""Report on reinforcement learning: metrics, traces and figures in MLflow, lines in the terminal.

Everything here is made from the ledger's records of finished sub-steps; nothing here decides what
a run produces.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from flows.tracking import first_charts, paper_figures, pictures, run_figures, traces
from flows.tracking.progress import Progress
from flows.tracking.run import Run
from flows.tracking.traces import MlflowTrace
from params.schema.recipe import Recipe
from params.schema.reinforce import Reinforce
from tasks.ledger import artifacts
from tasks.ledger.substeps import SubStep
from tasks.rollouts.branching import least_rise
from tasks.training.curves import (
    TRAINING,
    Seconds,
    spent_so_far,
    sum_seconds,
    training_curve,
    training_records,
)
from tasks.training.iteration import Iteration
from tasks.trees import validation
from tasks.trees.metrics import together
from tasks.trees.tables import read_rows
from tasks.trees.validation import Validated

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEARNING = ("advantage", "update", "reward_model")  # verbs that no iteration calls ahead


def log_iteration(
    run: Run, progress: Progress, iteration: Iteration, settings: Reinforce, began: float
) -> list[Seconds]:
    """Log one iteration to MLflow and advance the progress bar; return its seconds by part.

    ``began`` is when the iteration was started, in unix seconds. The list has one entry, or none
    where a sub-step came from the ledger, so that the iteration was not timed as a whole.
    """
    records = training_records(iteration)
    metrics = metrics_of(iteration)
    progress.note(reward=metrics["reward"], success=metrics["success"])
    progress.advance(1)
    number = records[0]["step"]["iteration"]
    finished = max(record["finished"] for record in records)
    parts = sum_seconds(iteration)
    speeds = {
        "sampled_tokens_a_second": metrics["sampled_tokens"] / parts["sampling"],
        "trained_tokens_a_second": metrics["trained_tokens"] / parts["update"],
    }
    log_start = time.time()
    shown = {**metrics, **speeds, **first_charts.of(metrics)}
    run.log_metrics(shown, step=number, at=finished)
    if number % settings.trace_every == 0 and settings.trace_questions:
        run.log_traces(partial(sample_traces, iteration, settings.trace_questions))
    timed = records
    if settings.ahead:  # rollout, estimate and reward may have run during the previous iteration
        timed = [record for verb in LEARNING for record in iteration.get(verb, ())]
    exams = iteration.get("validation", ())
    timed = [*timed, *exams]
    if settings.validation:
        parts["validation"] = sum(record["duration"] for record in exams)
    if any(record["finished"] < began for record in timed):
        return []
    now = time.time()
    tracking = now - log_start
    # what was sampled ahead took no time of this iteration, so the rest may be below zero
    rest = now - began - tracking - sum(parts.values())
    seconds = {**parts, "tracking": tracking, "orchestration": max(0.0, rest)}
    run.log_metrics(
        {f"seconds_{name}": value for name, value in seconds.items()}, step=number, at=finished
    )
    return [seconds]


def metrics_of(iteration: Iteration) -> dict[str, float]:
    """Return the metrics of an iteration by name; several batches are averaged."""
    metrics: dict[str, float] = {}
    for verb in TRAINING:
        metrics |= together([record["metrics"] for record in iteration[verb]])
    for record in iteration.get("reward_model", ()):
        metrics |= {f"reward_model/{name}": value for name, value in record["metrics"].items()}
    return metrics


def sample_traces(iteration: Iteration, size: int) -> list[MlflowTrace]:
    """Return the trajectories of an iteration's first ``size`` questions as MLflow traces."""
    rollout, reward = iteration["rollout"][0], iteration["reward"][0]
    return traces.sample(
        SubStep(**rollout["step"]),
        artifacts.output(rollout, "trees"),
        artifacts.output(reward, "rewards"),
        rollout["finished"],
        size,
    )


def log_validation(run: Run, progress: Progress, policies: Sequence[Validated], seed: int) -> None:
    """Log what policies got for the validation questions, with intervals, and print it.

    The step in MLflow is the number of iterations that the policy has learned from.
    """
    for one, row in zip(policies, validation.points(policies, seed), strict=True):
        values = {f"validation/{name}": row[name] for name in row if name != "iteration"}
        run.log_metrics(values, step=one.iterations, at=one.finished)
        progress.write(
            f"validation after {one.iterations} iterations: success {100 * row['success']:.1f} % "
            f"[{100 * row['success_low']:.1f}, {100 * row['success_high']:.1f}] of "
            f"{len(one.values['success'])} questions"
        )


def report_published(
    run: Run, iteration: int, policies: Sequence[Validated], recipe: Recipe
) -> None:
    """Print which iteration's policy is published, and keep it as a tag."""
    validation_settings = recipe.reinforce.validation
    why = "the last one"
    if validation_settings and validation_settings.publish == "best":
        measure = recipe.verdict.measure
        mean = validation.best(policies, measure).mean(measure)
        why = f"the best by validation, {measure} {100 * mean:.1f} %"
    learned = f"{iteration + 1} iteration{'s' * (iteration > 0)}"
    print(f"reinforce: the policy after {learned} is published, {why}")
    run.set_tags({"published_iteration": str(iteration), "published": why})


def log_figures(run: Run, iterations: Sequence[Iteration], recipe: Recipe, name: str) -> None:
    """Log the figures of a whole run: learning curve, entropy around tool results, branching."""
    data = _figure_data(iterations, recipe)
    pictures.log(run, name, "reinforce", data, partial(_drawn, data))


def _figure_data(iterations: Sequence[Iteration], recipe: Recipe) -> dict[str, Any]:
    """Return what the figures of a run show."""
    curve: list[dict[str, Any]] = [
        {"iteration": number, **together([record["metrics"] for record in iteration["reward"]])}
        for number, iteration in enumerate(iterations)
    ]
    exams = [record for iteration in iterations for record in iteration.get("validation", ())]
    numbers = [float(point["iteration"]) for point in curve]
    last_trees = artifacts.output(iterations[-1]["rollout"][0], "trees")
    return {
        "curve": curve,
        "asked": validation.points(validation.validated(exams), recipe.seed),
        "dynamics": {
            "iteration": numbers,
            **training_curve(iterations),
            **spent_so_far(iterations),
        },
        "state_groups": [
            {"iteration": number, "sizes": sizes}
            for number, iteration in enumerate(iterations)
            if (sizes := iteration["advantage"][0].get("state_groups"))
        ],
        "profile": [
            {"iteration": number, **point}
            for number, iteration in enumerate(iterations)
            for point in iteration["rollout"][0]["profile"]
        ],
        "decisions": read_rows(Path(last_trees.path) / "decisions.parquet"),
        "rise": least_rise(recipe.reinforce.rollout),
    }


def _drawn(data: Mapping[str, Any]) -> dict[str, Figure]:
    """Return the figures of a run by name; those that have nothing to show are left out."""
    dynamics = data["dynamics"]
    drawn = {
        "learning_curve": run_figures.learning_curve(data["curve"], data["asked"]),
        "training_dynamics": run_figures.training_curves(
            {"": [dynamics]}, "iteration", "iteration"
        ),
        **paper_figures.of_run(dynamics),
    }
    if data["state_groups"]:  # where the algorithm's marks are environment steps
        drawn["state_groups"] = run_figures.state_groups(data["state_groups"])
    if data["profile"]:
        drawn["entropy_around_tools"] = run_figures.entropy_around_tools(data["profile"])
    if data["decisions"]:
        drawn["branching_decisions"] = run_figures.decisions(data["decisions"], data["rise"])
    return drawn


def report_time(run: Run, seconds: Sequence[Seconds]) -> None:
    """Print the mean seconds of an iteration by part, and log them as a figure.

    ``seconds`` has an entry for each timed iteration; without any, nothing is printed or logged. An
    iteration that lacks a part, such as a training of the reward model, spent 0 seconds on it.
    """
    if not seconds:
        return
    names = dict.fromkeys(name for entry in seconds for name in entry)
    mean = {name: fmean(entry.get(name, 0.0) for entry in seconds) for name in names}
    total = sum(mean.values())
    print(f"seconds of one iteration, mean of {len(seconds)}: {total:.2f}")
    for name, value in sorted(mean.items(), key=lambda part: -part[1]):
        print(f"  {name:<14}{value:7.3f} {value / total:6.1%}")
    run.log_figure(run_figures.seconds_by_part(mean), "seconds_by_part.png")

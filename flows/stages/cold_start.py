"""Fine-tune the first policy on the traces, or start from the champion."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from prefect import flow

from flows.tracking import policy_check_report
from flows.tracking.progress import Progress
from flows.tracking.run import Run, stage_run
from flows.workers import stage, substep_tasks
from params.run_folders import RunFolders
from params.schema.recipe import Recipe
from tasks import recipes
from tasks.check_policy import STAGE, check_policy, forget, inputs_of
from tasks.cold_start import ColdStartInputs, cold_start
from tasks.correct import ALONE, CorrectInputs, correct, corrections_of
from tasks.environments import open_environment
from tasks.environments.contract import OpenEnvironment
from tasks.learning.learner_group import open_learners
from tasks.ledger import artifacts, keys
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.policy import champion
from tasks.rollout import RolloutInputs, rollout, told_of


@flow(name="cold_start")
def cold_start_flow(name: str) -> None:
    """Make ``models/<recipe>/cold_start``, which reinforcement learning begins with.

    It is ``models/<recipe>/initial`` after the traces, and after the corrections that the recipe
    asks for, or as it is where the recipe has no cold start; the champion as it is, where the
    recipe starts there and has one. Before anything is learned, the policy is checked
    (tasks/check_policy.py).
    """
    recipe = recipes.load(name, Path("params"))
    folders = RunFolders(name)
    initial, traces = Artifact.at(folders.initial), Artifact.at(folders.traces)
    reigning = champion.policy(folders.champion)
    begins = reigning if recipe.start == "champion" else None
    key = keys.stage_key(recipe, initial, traces)
    with (
        substep_tasks.opened() as ledger,
        stage_run(name, "cold_start", key, stage.run_tags()) as run,
    ):
        step = SubStep(name, "cold_start", 0, recipe.seed, ledger)
        records: list[Record] = []
        policy = begins or initial
        checked = _checked(run, recipe, policy, SubStep(name, STAGE, 0, recipe.seed, ledger))
        policy_check_report.write(checked, folders.policy_check)
        if recipe.cold_start and not begins:
            inputs = ColdStartInputs(initial, traces, recipe.cold_start, recipe.machine)
            records = [_fine_tuned(step, inputs, run)]
            if corrections := corrections_of(recipe):
                with _opened(recipe, folders.corpus) as environment:
                    for number in range(1, corrections.rounds + 1):
                        again = replace(step, iteration=number)
                        records += _corrected(again, recipe, records, run, environment)
            policy = artifacts.output(records[-1], "policy")
        if recipe.start == "champion":
            print("cold_start: " + ("the champion as it is" if begins else "no champion yet"))
        if not recipe.cold_start and not begins:
            print("cold_start: none, the first policy as it is")
        artifacts.publish(policy, folders.cold_start)
        artifacts.publish_records(records, folders.records("cold_start"))


def _checked(run: Run, recipe: Recipe, policy: Artifact, step: SubStep) -> Record:
    """Check the policy, and leave nothing of it in memory: training loads its own."""
    questions = Artifact.at(RunFolders(step.recipe).split("train"))
    context = recipe.prepare.policy.context
    inputs = inputs_of(policy, questions, recipe.engine, recipe.machine, context)
    rows = recipe.reinforce.rollout.rows
    try:
        return policy_check_report.reported(
            run, partial(check_policy, step, inputs, policy=policy, rows=rows)
        )
    finally:
        forget()


def _fine_tuned(step: SubStep, inputs: ColdStartInputs, run: Run, done: int = 0) -> Record:
    """Fine-tune with a progress bar, and log the curve. ``done``: steps of earlier rounds."""
    settings = inputs.settings
    title = f"cold start, corrections {step.iteration}" if step.iteration else "cold start"
    progress = Progress(title, settings.steps, unit="steps")
    with open_learners(inputs.machine) as learners:
        record = cold_start(step, inputs, advance=progress.reach, learners=learners)
    progress.close()
    for point in record["curve"]:
        values = {name: value for name, value in point.items() if name != "step"}
        run.log_metrics(values, step=done + point["step"], at=record["finished"])
    return record


def _opened(recipe: Recipe, corpus: Path) -> AbstractContextManager[OpenEnvironment]:
    """Open the world in which the policy acts to be corrected."""
    return open_environment(recipe.tools, recipe.environment, recipe.machine.threads, corpus)


def _corrected(
    step: SubStep,
    recipe: Recipe,
    before: Sequence[Record],
    run: Run,
    environment: OpenEnvironment,
) -> list[Record]:
    """Let the newest policy act, ask the solver about its states, and train on that as well.

    ``before``: the records of the stage so far. Return those of this round, training last.
    """
    corrections, cold = corrections_of(recipe), recipe.cold_start
    assert corrections and cold
    rolled_out, labelled = _labelled(step, recipe, before, corrections.episodes, environment)
    metrics = labelled["metrics"]
    done = cold.steps + (step.iteration - 1) * corrections.steps
    run.log_metrics(metrics, step=done, at=labelled["finished"])
    print(
        f"cold start, corrections {step.iteration}: {metrics['corrections']:,} states of "
        f"{corrections.episodes} episodes, the policy acts as the solver in "
        f"{metrics['agreement']:.0%}",
        flush=True,
    )
    settings = cold.model_copy(update={"steps": corrections.steps})
    policy, traces = artifacts.output(before[-1], "policy"), artifacts.output(labelled, "traces")
    inputs = ColdStartInputs(policy, traces, settings, recipe.machine)
    return [rolled_out, labelled, _fine_tuned(step, inputs, run, done)]


def _labelled(
    step: SubStep,
    recipe: Recipe,
    before: Sequence[Record],
    episodes: int,
    environment: OpenEnvironment,
) -> tuple[Record, Record]:
    """Return the record of the newest policy's episodes, and that of the solver's acts in them."""
    folders, agent = RunFolders(step.recipe), recipes.agent_of(recipe)
    policy = artifacts.output(before[-1], "policy")
    earlier = [record for record in before if record["verb"] == "correct"]
    traces = artifacts.output(earlier[-1], "traces") if earlier else Artifact.at(folders.traces)
    rolled_out = rollout(
        step,
        RolloutInputs(
            policy=policy,
            questions=Artifact.at(folders.split("train")),
            size=episodes,
            first=(step.iteration - 1) * episodes,
            budget=ALONE,
            agent=agent,
            corpus=Artifact.at(folders.corpus),
            told=told_of(environment),
        ),
        environment=environment,
    )
    trees, context = artifacts.output(rolled_out, "trees"), recipe.prepare.policy.context
    inputs = CorrectInputs(trees, traces, policy, agent, context)
    return rolled_out, correct(step, inputs, environment=environment)


if __name__ == "__main__":
    stage.main(cold_start_flow)

"""Fine-tune the first policy on the traces, or start from the champion."""

from __future__ import annotations

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
from tasks.learning.learner_group import Learners, open_learners
from tasks.ledger import artifacts, keys
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.policy import champion


@flow(name="cold_start")
def cold_start_flow(name: str) -> None:
    """Make ``models/<recipe>/cold_start``, which reinforcement learning begins with.

    It is ``models/<recipe>/initial`` after the traces, or as it is where the recipe has no cold
    start; the champion as it is, where the recipe starts there and has one. Before anything is
    learned, the policy is checked (tasks/check_policy.py).
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
            with open_learners(recipe.machine) as learners:
                records = [_fine_tuned(step, inputs, run, learners)]
            policy = artifacts.output(records[0], "policy")
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


def _fine_tuned(step: SubStep, inputs: ColdStartInputs, run: Run, learners: Learners) -> Record:
    """Fine-tune with a progress bar, and log the curve."""
    progress = Progress("cold start", inputs.settings.steps, unit="steps")
    record = cold_start(step, inputs, advance=progress.reach, learners=learners)
    progress.close()
    for point in record["curve"]:
        values = {name: value for name, value in point.items() if name != "step"}
        run.log_metrics(values, step=point["step"], at=record["finished"])
    return record


if __name__ == "__main__":
    stage.main(cold_start_flow)

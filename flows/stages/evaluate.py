"""Ask cold start, trained policy and champion the same held-out questions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from prefect import flow

from flows.tracking import pictures, run_figures
from flows.tracking.outcome_report import outcome_metrics, panel_tags, rows_by_measure
from flows.tracking.progress import Progress
from flows.tracking.run import stage_run
from flows.workers import stage, substep_tasks
from params.run_folders import RunFolders
from tasks import recipes
from tasks.evaluate import EvaluateInputs, evaluate, success_rows, table_rows
from tasks.evaluation.exam import Exam, answer, rewards_of, verdicts_of
from tasks.ledger import artifacts, keys
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.policy import champion
from tasks.policy.machine import use_machine
from tasks.recipes.opening import open_recipe, reader_of
from tasks.rewards import judging
from tasks.tools import recording
from tasks.tools.recording import CALLS, Origin
from tasks.trees import panels


@flow(name="evaluate")
def evaluate_flow(name: str) -> None:
    """Write ``reports/<recipe>`` (metrics and table) and ``data/<recipe>/evaluation.parquet``."""
    recipe = recipes.load(name, Path("params"))
    folders = RunFolders(name)
    policies = _policies(folders)
    questions = Artifact.at(folders.split("test"))
    panel = Artifact.at(folders.panel("test"))
    corpus = Artifact.at(folders.corpus)
    use_machine(recipe.machine)
    key = keys.stage_key(recipe, questions, panel, corpus, *policies.values())
    with (
        substep_tasks.opened() as ledger,
        stage_run(name, "evaluate", key, stage.run_tags()) as run,
        open_recipe(recipe, folders.corpus) as environment,
    ):
        step = SubStep(name, "evaluate", 0, recipe.seed, ledger)
        whole, size = panels.load(Path(panel.path)), recipe.evaluate.questions
        available = len(whole.tasks)
        first = slice_for(policies["trained"], policies.get("champion"), available, size)
        panel_summary = panels.summary(whole, first, size)
        run.set_tags(panel_tags(panel_summary))
        reader = reader_of(recipe, policies["trained"].path, environment)
        exam = Exam(recipe, questions, panel, corpus, environment, reader, first)
        answered = {
            name: _answered(exam, replace(step, stage=f"evaluate/{name}"), policy)
            for name, policy in policies.items()
        }
        rewards = {name: rewards_of(records) for name, records in answered.items()}
        comparison = evaluate(
            step,
            EvaluateInputs(
                settings=recipe.evaluate, verdict=recipe.verdict, panel=panel_summary, **rewards
            ),
        )
        _publish(folders, [*chain.from_iterable(answered.values()), comparison])
        recording.publish_calls(recorded_calls(answered), folders.calls / CALLS)
        verdicts = [verdicts_of(records) for records in answered.values()]
        judging.publish_verdicts(verdicts, folders.calls / judging.VERDICTS)
        figures_by_name = outcome_metrics(rows_by_measure(comparison["rows"]))
        run.log_metrics(figures_by_name, step=0, at=comparison["finished"])
        run.log_table(table_rows(comparison["rows"]), "evaluation.json")
        shown = success_rows(comparison["rows"])
        pictures.log(
            run,
            name,
            "evaluate",
            shown,
            lambda: {"success_by_kind": run_figures.success_by_kind(shown)},
        )


def _answered(exam: Exam, step: SubStep, policy: Artifact) -> list[Record]:
    """Let one policy answer, with a progress bar of its own."""
    progress = Progress(step.stage, exam.recipe.evaluate.questions, unit="questions")
    records = answer(exam, step, policy, progress.advance)
    progress.close()
    return records


def recorded_calls(answered: Mapping[str, Sequence[Record]]) -> dict[Origin, Path]:
    """Return the tables of recorded results by agent, where tools are not repeatable."""
    files = {
        Origin(f"evaluate/{name}", 0): Path(artifacts.output(records[0], "trees").path, CALLS)
        for name, records in answered.items()
    }
    return {origin: file for origin, file in files.items() if file.exists()}


def _policies(folders: RunFolders) -> dict[str, Artifact]:
    """Return the policies that answer: cold start, trained, and the champion where there is one."""
    begun, trained = Artifact.at(folders.cold_start), Artifact.at(folders.trained)
    policies = {"cold_start": begun, "trained": trained}
    reigning = champion.policy(folders.champion)
    return policies | ({"champion": reigning} if reigning else {})


def _publish(folders: RunFolders, records: Sequence[Record]) -> None:
    """Write the outs of the stage; the last record is the comparison's."""
    comparison = records[-1]
    artifacts.publish_records(records, folders.records("evaluate"))
    artifacts.publish(artifacts.output(comparison, "answers"), folders.evaluation)
    artifacts.publish(artifacts.output(comparison, "metrics"), folders.metrics)
    artifacts.publish(artifacts.output(comparison, "table"), folders.table)


def slice_for(candidate: Artifact, champion: Artifact | None, available: int, size: int) -> int:
    """Return the place in the panel at which the slice of tasks for a candidate begins.

    Of two or more slices, the digests of the candidate and of the champion choose one.
    So retrainings do not all search through the same questions for one that favours them.
    """
    slices = max(1, available // size)
    text = candidate.digest + (champion.digest if champion else "")
    return size * (int(hashlib.sha256(text.encode()).hexdigest(), 16) % slices)


if __name__ == "__main__":
    stage.main(evaluate_flow)

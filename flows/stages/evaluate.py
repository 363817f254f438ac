"""Ask cold start, trained policy and champion the same held-out questions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from prefect import flow

from flows.tracking import figures, pictures
from flows.tracking.outcome_report import outcome_metrics, panel_tags, rows_by_measure
from flows.tracking.progress import Progress
from flows.tracking.run import stage_run
from flows.workers import stage, substep_tasks
from tasks import recipes
from tasks.dialects import open_dialect
from tasks.environments import open_environment
from tasks.evaluate import EvaluateInputs, success_rows, table_rows
from tasks.evaluate import evaluate as compare
from tasks.evaluation.exam import Exam, answer, rewards_of, verdicts_of
from tasks.ledger import artifacts, keys
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.policy import champion
from tasks.policy.machine import use_machine
from tasks.policy.model import load_tokenizer
from tasks.rewards import judging
from tasks.tools import recording
from tasks.tools.recording import CALLS, Origin
from tasks.trees import panels


@flow(name="evaluate")
def evaluate(name: str) -> None:
    """Write ``reports/<recipe>`` (metrics and table) and ``data/<recipe>/evaluation.parquet``."""
    recipe = recipes.load(name, Path("params"))
    policies = _policies(Path("models", name))
    questions = Artifact.at(Path("data", name, "questions", "test.parquet"))
    panel = Artifact.at(Path("data", name, "panels", "test.json"))
    corpus = Artifact.at(Path("data", name, "corpus"))
    use_machine(recipe.machine)
    key = keys.stage_key(recipe, questions, panel, corpus, *policies.values())
    with (
        substep_tasks.opened() as ledger,
        stage_run(name, "evaluate", key, stage.run_tags()) as run,
        open_environment(
            recipe.tools,
            recipe.environment,
            recipe.machine.threads,
            Path(corpus.path),
        ) as environment,
    ):
        step = SubStep(name, "evaluate", 0, recipe.seed, ledger)
        whole, size = panels.load(Path(panel.path)), recipe.evaluate.questions
        available = len(whole.tasks)
        first = slice_for(policies["trained"], policies.get("champion"), available, size)
        panel_summary = panels.summary(whole, first, size)
        run.set_tags(panel_tags(panel_summary))
        tokenizer = load_tokenizer(policies["trained"].path)
        reader = open_dialect(recipe.dialect, tokenizer, recipe.dialogue, environment.specs)
        exam = Exam(recipe, questions, panel, corpus, environment, reader, first)
        answered = {
            name: _answered(exam, replace(step, stage=f"evaluate/{name}"), policy)
            for name, policy in policies.items()
        }
        rewards = {name: rewards_of(records) for name, records in answered.items()}
        comparison = compare(
            step, EvaluateInputs(settings=recipe.evaluate, panel=panel_summary, **rewards)
        )
        _publish(name, [*chain.from_iterable(answered.values()), comparison])
        recording.publish_calls(recorded_calls(answered), Path("data", name, "calls", CALLS))
        verdicts = [verdicts_of(records) for records in answered.values()]
        judging.publish_verdicts(verdicts, Path("data", name, "calls", judging.VERDICTS))
        figures_by_name = outcome_metrics(rows_by_measure(comparison["rows"]))
        run.log_metrics(figures_by_name, step=0, at=comparison["finished"])
        run.log_table(table_rows(comparison["rows"]), "evaluation.json")
        shown = success_rows(comparison["rows"])
        pictures.log(
            *(run, name, "evaluate", shown),
            lambda: {"success_by_kind": figures.success_by_kind(shown)},
        )


def _answered(exam: Exam, step: SubStep, policy: Artifact) -> list[Record]:
    """Let one policy answer, with a progress bar of its own."""
    progress = Progress(step.stage, exam.recipe.evaluate.questions)
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


def _policies(models: Path) -> dict[str, Artifact]:
    """Return the policies that answer: cold start, trained, and the champion where there is one."""
    policies = {name: Artifact.at(models / name) for name in ("cold_start", "trained")}
    reigning = champion.policy(models / "champion")
    return policies | ({"champion": reigning} if reigning else {})


def _publish(recipe: str, records: Sequence[Record]) -> None:
    """Write the outs of the stage; the last record is the comparison's."""
    data, reports, comparison = Path("data", recipe), Path("reports", recipe), records[-1]
    artifacts.publish_records(records, data / "records" / "evaluate.jsonl")
    artifacts.publish(artifacts.output(comparison, "answers"), data / "evaluation.parquet")
    artifacts.publish(artifacts.output(comparison, "metrics"), reports / "metrics.json")
    artifacts.publish(artifacts.output(comparison, "table"), reports / "table.md")


def slice_for(candidate: Artifact, champion: Artifact | None, available: int, size: int) -> int:
    """Return the place in the panel at which the slice of tasks for a candidate begins.

    Of two or more slices, the digests of the candidate and of the champion choose one.
    So retrainings do not all search through the same questions for one that favours them.
    """
    slices = max(1, available // size)
    text = candidate.digest + (champion.digest if champion else "")
    return size * (int(hashlib.sha256(text.encode()).hexdigest(), 16) % slices)


if __name__ == "__main__":
    stage.main(evaluate)

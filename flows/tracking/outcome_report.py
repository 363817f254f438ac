"""Report what a whole run has come to: figures, datasets and table in MLflow, artifacts in Prefect.

They are logged to the pipeline's run, so that runs sort, compare and plot in MLflow's list. So are
the curves of its training that stand first, beside those of the stage's own run.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.tracking import curve_file, first_charts
from flows.tracking.run import Run
from flows.tracking.run_summary import description, verdict_sentence
from params.run_folders import RunFolders
from tasks.ledger.artifacts import digest

# dataset below data/<recipe> -> context, which MLflow's list shows in brackets
DATASETS = {
    "traces.parquet": "cold start",
    "questions/train.parquet": "training",
    "questions/validation.parquet": "validation",
    "questions/test.parquet": "evaluation",
}

log = logging.getLogger(__name__)


def outcome_metrics(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return figures by name from measures by agent, with the bounds of their intervals.

    "success, story" of "cold start" becomes ``success_story/cold_start``, and ``..._low`` and
    ``..._high``; MLflow groups the names before the slash.
    """
    return {
        f"{_name(measure)}/{_name(agent)}{suffix}": float(values[bound])
        for measure, agents in measured.items()
        for agent, values in agents.items()
        for bound, suffix in (("mean", ""), ("low", "_low"), ("high", "_high"))
    }


def panel_tags(panel: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags that name the tasks that were asked, and the panel that they are part of."""
    return {"panel": panel["digest"], "panel.of": panel["of"]["digest"]}


def rows_by_measure(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return evaluate's rows as measures by agent."""
    return {
        row["measure"]: {name: value for name, value in row.items() if isinstance(value, Mapping)}
        for row in rows
    }


def log_outcome(
    run: Run, recipe: str, seconds: Mapping[str, float], lines: Sequence[str] = ()
) -> None:
    """Log what ``reports/<recipe>`` has, the datasets, and the seconds of each stage by name.

    ``lines`` end the run's description.
    """
    folders = RunFolders(recipe)
    measured = _read(folders.metrics)
    verdict = _read(folders.verdict)
    if panel := measured.pop("panel", None):
        run.set_tags(panel_tags(panel))
    gained = measured.pop("differences", {})
    figures = outcome_metrics(measured)  # the list on a run's page keeps this order
    figures |= outcome_metrics({f"{name} gained on": one for name, one in gained.items()})
    if verdict:
        figures["promote"] = float(verdict["promote"])
        run.set_tags({"verdict": verdict_sentence(verdict)})
    figures |= {f"seconds/{stage}": value for stage, value in seconds.items()}
    figures["seconds/all"] = sum(seconds.values())
    run.log_metrics(figures, step=0, at=time.time())
    _log_curves(run, folders.data / "curve.csv")
    run.log_datasets(datasets(folders.data))
    if table := _table(recipe):
        run.log_text(table, folders.table.name)
    if told := description(measured, verdict, lines):
        run.set_tags({"mlflow.note.content": told})  # the description on the run's page


def _log_curves(run: Run, file: Path) -> None:
    try:
        curve = curve_file.of_training(curve_file.read(file))
    except ValueError as error:  # the run has its results
        log.warning("MLflow's run of the pipeline lacks the curves of training: %s", error)
        return
    steps = [int(number) for number in curve.pop(curve_file.NUMBER, ())]
    run.log_curves(first_charts.of(curve), steps, at=time.time())


def datasets(data: Path) -> list[dict[str, str]]:
    """Return the datasets of a recipe that exist: name, digest, source and context of each."""
    return [
        {
            "name": f"{data.name}/{Path(name).stem}",
            "digest": digest(data / name)[:36],  # all that MLflow keeps
            "source": str(data / name),
            "context": context,
        }
        for name, context in DATASETS.items()
        if (data / name).exists()
    ]


def show_in_prefect(recipe: str, page: str | None) -> None:
    """Add table, verdict and ``page``, the address in MLflow, to the flow run of this process.

    A fault of Prefect's server does not end a run that has its results.
    """
    from prefect.artifacts import create_link_artifact, create_markdown_artifact

    key = re.sub(r"[^a-z0-9-]+", "-", recipe.lower())
    try:
        if table := _table(recipe):
            create_markdown_artifact(table, key=f"outcome-{key}", description="what came out")
        if page:
            create_link_artifact(page, link_text="the run in MLflow", key=f"mlflow-{key}")
    except Exception as error:  # whatever it is, the run has its results
        if not getattr(error, "is_said", False):  # flows/workers/outages.py
            log.warning("Prefect's server did not take the artifacts of the run: %s", error)


def _table(recipe: str) -> str:
    """Return the table of the run with its verdict, as Markdown; "" where there is none."""
    file = RunFolders(recipe).table
    if not file.exists():
        return ""
    verdict = _read(RunFolders(recipe).verdict)
    return file.read_text() + (f"\nVerdict: {verdict_sentence(verdict)}\n" if verdict else "")


def _read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text())) if file.exists() else {}


def _name(text: str) -> str:
    return re.sub(r"[^\w.@-]+", "_", text)

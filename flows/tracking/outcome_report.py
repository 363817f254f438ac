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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from flows.host.addresses import without_password
from flows.tracking import curve_file, first_charts, outcome_words, prefect_events, store
from flows.tracking.run import Run
from flows.tracking.run_summary import Changes, description, verdict_sentence
from params.run_folders import RunFolders
from tasks.ledger.artifacts import digest

# dataset below data/<recipe> -> context, which MLflow's list shows in brackets
DATASETS = {
    "traces.parquet": "cold start",
    "questions/train.parquet": "training",
    "questions/validation.parquet": "validation",
    "questions/test.parquet": "evaluation",
}

MOST_CHANGED, MOST_LOST = 20, 10  # that are shown
LONGEST_VALUE = 80  # characters of a recipe's value

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


def words(recipe: str, run: Run, seconds: Mapping[str, float]) -> list[str]:
    """Return in at most six lines what a run has changed; see ``outcome_words.lines``."""
    folders = RunFolders(recipe)
    measured, verdict = _read(folders.metrics), _read(folders.verdict)
    return outcome_words.lines(measured, verdict, _alarms(run), seconds)


def worse_kinds(recipe: str) -> list[str]:
    """Return the kinds of question at which a recipe's last run is worse beyond chance."""
    return outcome_words.worse_kinds(_read(RunFolders(recipe).metrics), compared_with(recipe))


def compared_with(recipe: str) -> str:
    """Return the agent with which a recipe's last run was compared."""
    return outcome_words.compared_with(_read(RunFolders(recipe).verdict))


def _alarms(run: Run) -> list[str] | None:
    """Return the alarms of the training in a pipeline's run; None where it has trained nothing."""
    if not run.id:
        return None
    try:
        stages = store.runs_tagged(store.PARENT_RUN, run.id)
    except ConnectionError:
        return None
    trained = [tags for tags in stages if tags.get("stage") == "reinforce"]
    return [*filter(None, trained[-1].get("alarms", "").split(", "))] if trained else None


@dataclass(frozen=True)
class Findings:
    """What came out of a run, and where a person goes on to look; addresses may be ""."""

    words: Sequence[str] = ()
    lost: Sequence[tuple[str, str]] = ()  # held-out questions answered worse, with their kinds
    mlflow: str = ""  # the run
    server: str = ""  # of Prefect, which serves the next two
    page: str = ""  # of the run
    question: str = ""  # in the page, with which to begin
    which: str = ""  # the question, in words
    file: str = ""  # of the page, where it stays
    before: str = ""  # the name of the run before
    changed: Changes = field(default_factory=dict)  # what differs from it in the recipe


def show_in_prefect(recipe: str, found: Findings, above: str | None = None) -> None:
    """Add what came out to the flow run of this process.

    ``above``: the task run that has started this process, whose flow run shows it, too. A fault of
    Prefect's server does not end a run that has its results.
    """
    from prefect.artifacts import MarkdownArtifact, create_link_artifact

    key = re.sub(r"[^a-z0-9-]+", "-", recipe.lower())
    try:
        if text := _shown(recipe, found):
            verdict = outcome_words.sentence(_read(RunFolders(recipe).verdict))
            for flow_run in [None, *([_flow_run_of(above)] if above else [])]:  # None: this one
                MarkdownArtifact(
                    key=f"outcome-{key}",
                    description=verdict or "what came out",
                    markdown=text,
                    flow_run_id=flow_run,
                ).create()
        if found.mlflow:
            create_link_artifact(found.mlflow, link_text="the run in MLflow", key=f"mlflow-{key}")
    except Exception as error:  # whatever it is, the run has its results
        if not getattr(error, "is_said", False):  # flows/workers/outages.py
            log.warning("Prefect's server did not take the artifacts of the run: %s", error)


def emit_verdict(recipe: str, run: Run, found: Findings) -> None:
    """Tell Prefect's automations about the verdict of a run, where there is one."""
    verdict = _read(RunFolders(recipe).verdict)
    if not verdict:
        return
    page = found.question or found.page
    payload = {
        "promote": verdict["promote"],
        "reason": verdict["reason"],
        "commit": run.commit,
        "words": "\n".join(found.words),
        "mlflow": found.mlflow,
        "page": found.server + page if page else "",
    }
    labels = {"beamline.promote": str(verdict["promote"]).lower()}
    prefect_events.emit(prefect_events.VERDICT, recipe, labels, payload)


def _flow_run_of(task_run: str) -> UUID | None:
    """Return the id of the flow run that a task run belongs to."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return client.read_task_run(UUID(task_run)).flow_run_id


def rejection(recipe: str) -> str:
    """Return why the last run of a recipe here is not to be promoted; "" where it is."""
    verdict = _read(RunFolders(recipe).verdict)
    return str(verdict["reason"]) if verdict and not verdict["promote"] else ""


def _shown(recipe: str, found: Findings) -> str:
    """Return what came out as Markdown: in words, where to look, what was changed, the table."""
    table = RunFolders(recipe).table
    if not table.exists():
        return ""
    parts = [
        "\n".join(f"- {line}" for line in found.words),
        _links(found),
        _changed(found),
        _lost(found.lost),
        table.read_text(),
    ]
    return "\n\n".join(filter(None, parts))


def _links(found: Findings) -> str:
    """Return where to look, the question to begin with first."""
    first = f"[{found.which}]({found.question})" if found.question else found.which
    links = [
        f"Begin with {first}" if first else "",
        f"[the page of the run]({found.page})" if found.page else "",
        f"[the run in MLflow]({found.mlflow})" if found.mlflow else "",
        f"`{found.file}`" if found.file else "",
    ]
    return " · ".join(filter(None, links))


def _changed(found: Findings) -> str:
    """Return a table of the values that differ from the run before."""
    if not found.before:
        return ""
    if not found.changed:
        return f"No value of the recipe differs from the run before, {found.before}."
    rows = [
        f"| `{name}` | {_code(values[0])} | {_code(values[1])} |"
        for name, values in [*found.changed.items()][:MOST_CHANGED]
    ]
    more = len(found.changed) - len(rows)
    if more > 0:
        rows.append(f"| … {more} more | | |")
    return "\n".join(
        [f"| differs from the run before | {found.before} | now |", "|---|---|---|", *rows]
    )


def _code(value: str) -> str:
    """Return a value for a cell of a Markdown table."""
    shown = " ".join(without_password(value).split()).replace("|", "\\|").replace("`", "'")
    return f"`{shown[:LONGEST_VALUE]}`"


def _lost(lost: Sequence[tuple[str, str]]) -> str:
    if not lost:
        return ""
    named = ", ".join(f"{question} ({kind})" for question, kind in lost[:MOST_LOST])
    more = f" and {len(lost) - MOST_LOST} more" if len(lost) > MOST_LOST else ""
    return f"Held-out questions that are answered worse than before: {named}{more}."


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

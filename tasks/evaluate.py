"""evaluate: compare the scored rollouts of several policies, with intervals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from prefect import task

from params.schema.evaluate import Evaluate
from tasks.ledger import prefect_cache, substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import Step
from tasks.scorers import is_graded
from tasks.trees import panels
from tasks.trees.intervals import bootstrap_interval
from tasks.trees.outcomes import ENDED_BY_WORLD, Outcome
from tasks.trees.tables import write_table

Rows = list[dict[str, Any]]
AGENTS = ("cold start", "trained", "champion")  # the last one where there is one

# what is measured of one answer or episode: label, value, unit
Measure = tuple[str, Callable[[dict[str, Any]], float], str]
ANSWERED: Measure = ("answer rate", lambda row: row["answer"] is not None, "%")
ENDED: Measure = ("episodes that ended", lambda row: row["outcome"] == Outcome.TERMINATED, "%")
MEASURES: tuple[Measure, ...] = (
    ("tool calls a question", lambda row: row["tool_calls"], ""),
    ("tool errors a question", lambda row: row["tool_errors"], ""),
    ("response length", lambda row: row["response_tokens"], "tokens"),
)


@dataclass(frozen=True)
class EvaluateInputs:
    """The scored answers of each agent, and how they are compared."""

    cold_start: Artifact
    trained: Artifact
    settings: Evaluate
    panel: Mapping[str, Any]  # what they were asked: panels.summary
    champion: Artifact | None = None


@task(**prefect_cache.TASK_OPTIONS)
@substeps.recorded
def evaluate(step: Step, inputs: EvaluateInputs) -> Record:
    """Aggregate the rewards of the agents on the same questions.

    Artifacts ``answers`` (a row an answer), ``metrics`` (JSON) and ``table`` (Markdown), each with
    the panel. Intervals are 95 % percentile bootstrap over questions.
    """
    rewards = zip(AGENTS, (inputs.cold_start, inputs.trained, inputs.champion), strict=True)
    tables = {agent: pq.read_table(made.path) for agent, made in rewards if made}
    answers = {agent: table.to_pylist() for agent, table in tables.items()}
    rows = compare(answers, inputs.settings.bootstrap, step.seed)
    labelled = [
        table.add_column(0, "agent", pa.array([agent] * len(table)))
        for agent, table in tables.items()
    ]
    said = {panels.METADATA: json.dumps(inputs.panel)}
    asked = pa.concat_tables(labelled).replace_schema_metadata(said)
    write_table(asked, step.out / "answers.parquet")
    metrics = {"panel": inputs.panel, **_nested(rows)}
    (step.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    (step.out / "table.md").write_text(f"{markdown(rows)}\n{panels.sentence(inputs.panel)}\n")
    return {"rows": rows}


def compare(answers: Mapping[str, Rows], resamples: int, seed: int) -> list[dict[str, Any]]:
    """Return a row a measure: name, questions, unit, and each agent's mean with its interval."""
    kinds = sorted({row["kind"] for rows in answers.values() for row in rows})
    selections = [("success", tuple(kinds)), *((f"success, {kind}", (kind,)) for kind in kinds)]
    rows = []
    for name, chosen in selections:
        values = {
            agent: [float(row["success"]) for row in entries if row["kind"] in chosen]
            for agent, entries in answers.items()
        }
        rows.append(_measure(name, "%", values, resamples, seed))
    rows += _graded(answers, resamples, seed)
    for name, value, unit in (ENDED if in_a_world(answers) else ANSWERED, *MEASURES):
        values = {
            agent: [float(value(row)) for row in entries] for agent, entries in answers.items()
        }
        rows.append(_measure(name, unit, values, resamples, seed))
    return rows


def in_a_world(answers: Mapping[str, Rows]) -> bool:
    """Return whether an environment ended episodes and no agent gave an answer."""
    rows = [row for entries in answers.values() for row in entries]
    answered = any(row["answer"] is not None for row in rows)
    return not answered and any(row["outcome"] in ENDED_BY_WORLD for row in rows)


def _graded(answers: Mapping[str, Rows], resamples: int, seed: int) -> list[dict[str, Any]]:
    """Return rows of the mean score of graded scorers; a broken format that counts scores 0.

    A scorer is graded if it says so, or if it has given a score between 0 and 1.
    """
    every = [row for rows in answers.values() for row in rows]
    between = {row["scorer"] for row in every if row["score"] not in (0, 1)}
    graded = between | {name for name in {row["scorer"] for row in every} if is_graded(name)}
    values = {
        agent: [row["score"] * row["sound"] for row in rows if row["scorer"] in graded]
        for agent, rows in answers.items()
    }
    return [_measure("score", "%", values, resamples, seed)] if all(values.values()) else []


def _measure(
    name: str, unit: str, values: Mapping[str, Sequence[float]], resamples: int, seed: int
) -> dict[str, Any]:
    count = len(next(iter(values.values())))
    means = {agent: _mean(entries, resamples, seed) for agent, entries in values.items()}
    return {"measure": name, "questions": count, "unit": unit, **means}


def _mean(values: Sequence[float], resamples: int, seed: int) -> dict[str, float]:
    array = np.array(values, np.float64)
    low, high = bootstrap_interval(array, resamples, seed)
    return {"mean": float(array.mean()), "low": low, "high": high}


def _nested(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the metrics as DVC reads them: measure -> agent -> mean, low, high."""
    return {row["measure"]: {agent: row[agent] for agent in _agents(row)} for row in rows}


def _agents(row: Mapping[str, Any]) -> list[str]:
    return [agent for agent in AGENTS if agent in row]


def table_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the comparison as flat rows, one a measure and agent."""
    return [
        {"measure": row["measure"], "questions": row["questions"], "agent": agent, **row[agent]}
        for row in rows
        for agent in _agents(row)
    ]


def success_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return success by kind, a row a kind and agent; the first kind is "all"."""
    return [
        {
            "kind": "all"
            if row["measure"] == "success"
            else row["measure"].removeprefix("success, "),
            "agent": agent,
            "success": row[agent]["mean"],
            "low": row[agent]["low"],
            "high": row[agent]["high"],
        }
        for row in rows
        if row["measure"].startswith("success")
        for agent in _agents(row)
    ]


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the comparison as a Markdown table."""
    agents = _agents(rows[0])
    lines = [f"| | questions | {' | '.join(agents)} |", f"|---|{'---:|' * (1 + len(agents))}"]
    for row in rows:
        cells = " | ".join(_cell(row[agent], row["unit"]) for agent in agents)
        lines.append(f"| {row['measure']}{_unit(row['unit'])} | {row['questions']} | {cells} |")
    return "\n".join(lines) + "\n"


def _unit(unit: str) -> str:
    return f" ({unit})" if unit else ""


def _cell(value: Mapping[str, float], unit: str) -> str:
    scale, digits = (100, 1) if unit == "%" else (1, 2)
    mean, low, high = (scale * value[name] for name in ("mean", "low", "high"))
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"

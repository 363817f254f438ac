"""Report what agents without training have reached: a page, the same as JSON, and MLflow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.host import files
from flows.tracking.outcome_report import outcome_metrics
from flows.tracking.run import Run
from tasks.agents import table

Rows = Sequence[Mapping[str, Any]]  # of tasks.agents.table.summarise
INTERVALS = ("success", "lenient", "last_number", "score")  # measures with low and high


def write(page: Path, recipe: str, model: str, rows: Rows, reasons: str = "") -> None:
    """Write the table to ``page``, and its rows as JSON beside it.

    ``reasons``: why requests failed, as ``table.reasons``.
    """
    lines = [f"# Agents without training: {recipe}", "", f"Model: {model}.", ""]
    page.parent.mkdir(parents=True, exist_ok=True)
    with files.replaced(page) as partial:
        partial.write_text("\n".join([*lines, table.markdown(rows), table.NOTE]) + reasons)
    with files.replaced(page.with_suffix(".json")) as partial:
        partial.write_text(json.dumps({"model": model, "rows": rows}, indent=1) + "\n")


def log(run: Run, page: Path, rows: Rows, at: float) -> None:
    """Log the figures, the table and the page. ``at``: when the last of them was computed."""
    run.log_metrics(outcome_metrics(_by_measure(rows)), step=0, at=at)
    run.log_table([_flat(row) for row in rows], page.with_suffix(".json").name)
    run.log_file(page)


def _by_measure(rows: Rows) -> dict[str, dict[str, Any]]:
    """Return success and scores as measures by agent."""
    by_measure: dict[str, dict[str, Any]] = {}
    for row in rows:
        for measure in INTERVALS:
            if row.get(measure):
                by_measure.setdefault(f"{measure}, {row['set']}", {})[row["agent"]] = row[measure]
    return by_measure


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without nested values."""
    plain = {name: value for name, value in row.items() if name not in INTERVALS}
    for measure in INTERVALS:
        plain |= {f"{measure}_{bound}": value for bound, value in (row.get(measure) or {}).items()}
    return plain

"""The tables that papers print, with our results in the columns that are about our tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flows.tracking import comparison_tables as tables
from flows.tracking.comparison_tables import COLD_START, SCORES, SUCCESS, Result
from params.schema.suites import PaperColumn, PaperNumber, PaperTable, Suite

ByLabel = Mapping[str, Sequence[Result]]  # label of a variant -> its results, one a seed
Ours = dict[
    str, dict[str, float]
]  # column -> mean, low and high; without the two for a mean of sets

HERE = "here"
MEASURES = {"success": SUCCESS, "score": SCORES}


def section(table: PaperTable, results: ByLabel, resamples: int) -> str:
    """Return a paper's table by method, and below each method what was measured here.

    ``results``: also of the cold start and of variants that the paper's table does not have.
    """
    ours = {
        label: cells
        for label, results_of_label in results.items()
        if (cells := _ours(table, results_of_label, resamples))
    }
    lines = []
    for method in dict.fromkeys(
        [*(one for one in ours if one == COLD_START), *table.methods, *ours]
    ):
        lines += [
            [method, model, *map(number, rows[method])]
            for model, rows in table.models.items()
            if method in rows
        ]
        if method in ours:
            lines.append([method, HERE, *(_cell(ours[method].get(name)) for name in table.columns)])
    return (
        f"**The paper's {table.of}.** {table.unit}. {_about_ours(table, ours)}\n\n"
        + tables.table(["method", "run", *table.columns], lines)
    )


def beside(suite: Suite, label: str = "") -> list[str]:
    """Return what stands beside a variant in the table of our results; without one, the heads."""
    cells = []
    for table in suite.published:
        places = [(at, one.beside) for at, one in enumerate(table.columns.values()) if one.beside]
        trained = {
            model: rows for model, rows in table.models.items() if set(rows) & set(suite.variants)
        }
        for model, rows in trained.items():
            numbers = rows.get(label)
            for at, name in places:
                shown = number(numbers[at]) if numbers else ""
                cells.append(shown if label else f"paper: {name}, {model} (%)")
    return cells


def number(printed: PaperNumber) -> str:
    """Write a number with all digits that the paper prints, at least one after the point."""
    written = [printed.mean, *([] if printed.deviation is None else [printed.deviation])]
    return " ± ".join(f"{one:.1f}" if round(one, 1) == one else f"{one:g}" for one in written)


def covers(tables_of_paper: Sequence[PaperTable], results: Sequence[Result]) -> bool:
    """Return whether some table has a column of its own for each kind of our questions."""
    return any(
        set(results[0]["kinds"])
        <= {
            kind
            for column in table.columns.values()
            if column.sets or column.kinds
            for kind in _kinds(column, results[0])
        }
        for table in tables_of_paper
    )


def _about_ours(table: PaperTable, ours: Mapping[str, Ours]) -> str:
    if not ours:
        return "No column is about the tasks of this recipe, so nothing from here stands beside it."
    blank = [name for name in table.columns if not any(name in cells for cells in ours.values())]
    lacking = f" Nothing here is about {', '.join(blank)}." if blank else ""
    return f"Rows *{HERE}* are our runs, with 95 % intervals over seeds and questions.{lacking}"


def _ours(table: PaperTable, results: Sequence[Result], resamples: int) -> Ours:
    """Return what was measured of each column that is about the results' tasks."""
    cells: Ours = {}
    for name, column in table.columns.items():
        if not (column.sets or column.world):
            before = list(table.columns)[: list(table.columns).index(name)]
            if all(one in cells for one in before):
                cells[name] = {"mean": float(np.mean([cells[one]["mean"] for one in before]))}
            continue
        measure = MEASURES[column.measure]
        if found := tables.mean_of_kinds(results, _kinds(column, results[0]), measure, resamples):
            cells[name] = found
    return cells


def _kinds(column: PaperColumn, result: Result) -> set[str]:
    """Return the kinds of a result's questions that a column is about."""
    world = result["panel"]["source"].removeprefix("environment ")
    if column.world:
        return set(column.kinds or result["kinds"]) if column.world == world else set()
    return set(column.sets)


def _cell(measured: Mapping[str, float] | None) -> str:
    if measured is None:
        return ""
    return (
        tables.percent(measured, "mean") if "low" in measured else f"{100 * measured['mean']:.1f}"
    )

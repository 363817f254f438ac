"""The table of agents: for each agent and set, what it reached and what it took. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tasks.scorers import is_graded, label, lenient
from tasks.trees.intervals import bootstrap_interval
from tasks.trees.words import printable

Row = dict[str, Any]
SHOWN = 80  # characters of a reason
MOST_REASONS = 5  # of an agent that are named
ALL = "all"  # the set of the row with the questions of all sets
NOTE = (
    "Success, lenient and score: means with 95 % bootstrap intervals over questions. Lenient: the "
    "answer stands anywhere in the last reply, whatever its form. Calls and tokens: means a "
    "question, all trials and all models together. Oracle: the gold answer decided on another "
    "trial.\n"
)
COUNTS = (  # column of the results, and of the table
    ("tool_calls", "tool calls"),
    ("model_calls", "requests"),
    ("prompt_tokens", "tokens read"),
    ("completion_tokens", "tokens written"),
)


def summarise(
    results: Mapping[str, Sequence[Mapping[str, Any]]], resamples: int, seed: int
) -> list[Row]:
    """Return a row an agent and set, and one an agent for all sets where there are several.

    ``results``: agent -> rows of try_agent. A row has agent, set, questions, success (and score
    where a scorer grades all of them, and both lenient scores where they mean something) with mean,
    low and high (95 % bootstrap over questions), scorers, the means of COUNTS a question, and
    faults, the number of tasks whose model failed.
    """
    rows = []
    for agent, rows_of_agent in results.items():
        sets = list(dict.fromkeys(str(row["set"]) for row in rows_of_agent))
        for name in [*sets, *([ALL] if len(sets) > 1 else [])]:
            rows_of_set = [row for row in rows_of_agent if name in (ALL, row["set"])]
            rows.append({"agent": agent, "set": name, **_measured(rows_of_set, resamples, seed)})
    return rows


def _measured(rows: Sequence[Mapping[str, Any]], resamples: int, seed: int) -> Row:
    graded = {row["scorer"] for row in rows if row["score"] not in (0, 1)}
    graded |= {row["scorer"] for row in rows if is_graded(row["scorer"])}
    scores = [row["score"] for row in rows if row["scorer"] in graded]
    return {
        "questions": len(rows),
        "success": _interval([row["success"] for row in rows], resamples, seed),
        "score": _interval(scores, resamples, seed) if len(scores) == len(rows) else None,
        **{name: _where_known(rows, name, resamples, seed) for name in lenient.COLUMNS},
        "scorers": sorted({label(row["scorer"]) for row in rows}),
        **{name: float(np.mean([row[name] for row in rows])) for name, _ in COUNTS},
        "faults": sum(bool(row["fault"]) for row in rows),
    }


def _interval(values: Sequence[float], resamples: int, seed: int) -> dict[str, float]:
    array = np.array(values, np.float64)
    low, high = bootstrap_interval(array, resamples, seed)
    return {"mean": float(array.mean()), "low": low, "high": high}


def _where_known(
    rows: Sequence[Mapping[str, Any]], column: str, resamples: int, seed: int
) -> dict[str, float] | None:
    """Return the mean of a column; None where some row has no value of it."""
    known = [value for row in rows if (value := row.get(column)) is not None]
    return _interval(known, resamples, seed) if len(known) == len(rows) else None


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table in Markdown; columns that no row fills are left out."""
    graded = {name for row in rows if row["score"] for name in row["scorers"]}
    score = f"{graded.pop() if len(graded) == 1 else 'score'} (%)" if graded else ""
    whatever_form = any(row["lenient"] for row in rows)
    failed = any(row["faults"] for row in rows)
    names = ["agent", "set", "questions", "success (%)"]
    names += (["lenient (%)"] if whatever_form else []) + ([score] if score else [])
    names += [title for _, title in COUNTS] + (["failed requests"] if failed else [])
    lines = [f"| {' | '.join(names)} |", f"|---|---|{'---:|' * (len(names) - 2)}"]
    for row in rows:
        cells = [row["agent"], row["set"], f"{row['questions']:,}", _cell(row["success"])]
        cells += [_cell(row["lenient"])] if whatever_form else []
        cells += [_cell(row["score"])] if score else []
        cells += [_count(row[name]) for name, _ in COUNTS]
        cells += [str(row["faults"])] if failed else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def reasons(results: Mapping[str, Sequence[Mapping[str, Any]]], files: Iterable[str]) -> str:
    """Return why requests of each agent failed, the most frequent reason first, in Markdown.

    "" where none did. ``files`` have the whole texts in their column ``fault``.
    """
    counts = {
        agent: Counter(_reason(row["fault"]) for row in rows if row["fault"])
        for agent, rows in results.items()
    }
    lines = [f"- {agent}: {_named(faults)}" for agent, faults in counts.items() if faults]
    if not lines:
        return ""
    where = ", ".join(f"`{file}`" for file in files)
    told = (
        f"Why requests failed, with the number of tasks (whole texts: column `fault` of {where}):"
    )
    return "\n".join(["", told, "", *lines, ""])


def _named(faults: Counter[str]) -> str:
    named = [f"{reason} ({count})" for reason, count in faults.most_common(MOST_REASONS)]
    others = faults.total() - sum(count for _, count in faults.most_common(MOST_REASONS))
    return ", ".join([*named, *([f"other reasons ({others})"] if others else [])])


def _reason(fault: str) -> str:
    if fault.isdecimal():
        return f"the server answers with the status {fault}"
    text = " ".join(printable(fault).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _count(value: float) -> str:
    return f"{value:,.2f}" if value < 10 else f"{value:,.0f}"


def _cell(value: Mapping[str, float] | None) -> str:
    if value is None:
        return ""
    mean, low, high = (100 * value[name] for name in ("mean", "low", "high"))
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"

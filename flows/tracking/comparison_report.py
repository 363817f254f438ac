"""Results of a comparison: a small file for each variant and seed, tables and figures of all."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.host import files
from flows.tracking import comparison_tables as tables
from flows.tracking import run_figures
from flows.tracking.comparison_tables import COLD_START, Result
from params.run_folders import RunFolders

LONGEST_NAME = 100  # characters of a folder's name, of the 255 that file systems allow


def slug(variant: str) -> str:
    """Return the name of a variant's folder."""
    plain = re.sub(r"[^\w.=-]+", "_", variant)
    known = variant == COLD_START or plain == variant.replace(", ", "_")
    if len(plain) <= LONGEST_NAME and known:
        return plain
    return f"{plain[:LONGEST_NAME]}-{hashlib.sha256(variant.encode()).hexdigest()[:8]}"


def place(recipe: str, variant: str, seed: int) -> Path:
    """Return the file of one result."""
    return RunFolders(recipe).reports / "comparison" / slug(variant) / f"seed-{seed}.json"


def read(recipe: str, variant: str, seed: int, key: str) -> Result | None:
    """Return a result that was saved with this key; None for none, and for one of another form."""
    file = place(recipe, variant, seed)
    try:
        result = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return None
    needed = {
        "key",
        "right",
        "scores",
        "kinds",
        "panel",
        *({"algorithm", "curve"} if variant != COLD_START else ()),
    }
    if not isinstance(result, dict) or not needed <= set(result) or result["key"] != key:
        return None
    return result


def committed(recipe: str, variants: Sequence[str]) -> list[Result]:
    """Return the results of these variants that are there, whatever their keys.

    Raises ValueError with the file for one that cannot be read.
    """
    results = []
    for variant in dict.fromkeys(variants):
        for file in sorted(place(recipe, variant, 0).parent.glob("seed-*.json")):
            try:
                result = json.loads(file.read_text())
                results.append(read(recipe, variant, result["seed"], result["key"]))
            except (ValueError, KeyError, TypeError):
                results.append(None)
            if results[-1] is None:
                raise ValueError(f"{file} is no result of a comparison, or has an older form")
    return [result for result in results if result is not None]


def save(recipe: str, result: Result) -> None:
    """Write one result; each list stands on a line of its own."""
    file = place(recipe, result["variant"], result["seed"])
    file.parent.mkdir(parents=True, exist_ok=True)
    with files.replaced(file) as partial:
        partial.write_text(f"{_in_lines(result)}\n")


def _in_lines(value: Any, indent: str = " ") -> str:
    """Format mappings over several lines, and everything else on one."""
    if not isinstance(value, Mapping):
        return json.dumps(value, separators=(",", ":"))
    entries = [f'{indent}"{name}": {_in_lines(one, indent + " ")}' for name, one in value.items()]
    return "{\n" + ",\n".join(entries) + f"\n{indent[1:]}}}"


def write(
    recipe: str, results: Sequence[Result], resamples: int, budget: str, baseline: str = ""
) -> None:
    """Write the tables and figures of the results so far.

    ``budget``: the kind of cost that training curves are drawn against. ``baseline``: the variant
    that the others are compared with; without one, or while it has no result, the best so far.
    """
    folder = RunFolders(recipe).reports
    rows = tables.table_rows(results, resamples)
    with files.replaced(folder / "comparison.md") as partial:
        partial.write_text(tables.report(results, rows, resamples, baseline))
    run_figures.save(run_figures.comparison(rows), folder / "comparison.png")
    if curves := tables.curves_of(results):
        drawn = run_figures.training_curves(curves, budget, budget.replace("_", " "))
        run_figures.save(drawn, folder / "comparison_curves.png")

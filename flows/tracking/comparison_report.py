"""Results of a comparison: a small file for each variant and seed, a table and a figure of all."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flows.host import files
from flows.tracking import figures
from tasks.trees import panels
from tasks.trees.intervals import interval_over_seeds

COLD_START = "cold start"
SPENT = ("sampled_tokens", "tool_calls", "environment_steps", "seconds")
LONGEST_NAME = 100  # characters of a folder's name, of the 255 that file systems allow

Result = Mapping[str, Any]  # of one variant and seed


def slug(variant: str) -> str:
    """Return the name of a variant's folder."""
    plain = re.sub(r"[^\w.=-]+", "_", variant)
    known = variant == COLD_START or plain == variant.replace(", ", "_")
    if len(plain) <= LONGEST_NAME and known:
        return plain
    return f"{plain[:LONGEST_NAME]}-{hashlib.sha256(variant.encode()).hexdigest()[:8]}"


def place(recipe: str, variant: str, seed: int) -> Path:
    """Return the file of one result."""
    return Path("reports", recipe, "comparison", slug(variant), f"seed-{seed}.json")


def read(recipe: str, variant: str, seed: int, key: str) -> Result | None:
    """Return a result that was saved with this key, or None."""
    file = place(recipe, variant, seed)
    try:
        found: Result = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if found.get("key") == key else None


def save(recipe: str, result: Result) -> None:
    """Write one result; the answers stand on one line."""
    file = place(recipe, result["variant"], result["seed"])
    file.parent.mkdir(parents=True, exist_ok=True)
    rest = {name: value for name, value in result.items() if name != "right"}
    text = json.dumps(rest, indent=1).removesuffix("\n}")
    right = json.dumps(result["right"], separators=(",", ":"))
    with files.replaced(file) as partial:
        partial.write_text(f'{text},\n "right": {right}\n}}\n')


def write(recipe: str, results: Sequence[Result], resamples: int) -> None:
    """Write the table and the figure of the results so far."""
    folder = Path("reports", recipe)
    rows = table_rows(results, resamples)
    with files.replaced(folder / "comparison.md") as partial:
        partial.write_text(f"{markdown(rows)}\n{_panel(results)}\n")
    figures.save(figures.comparison(rows), folder / "comparison.png")


def _panel(results: Sequence[Result]) -> str:
    """Return the line that names the panel that all variants were asked."""
    return panels.sentence(results[0]["panel"])


def table_rows(results: Sequence[Result], resamples: int) -> list[dict[str, Any]]:
    """Return a row for each variant, in the order of its first result.

    Success is the mean over seeds, with a 95 % interval over seeds and questions; what was spent
    and done is the mean over seeds.
    """
    rows = []
    for variant in dict.fromkeys(result["variant"] for result in results):
        own = [result for result in results if result["variant"] == variant]
        right_SQ = np.array([result["right"] for result in own], np.float64)
        low, high = interval_over_seeds(right_SQ, resamples, seed=0)
        row = {
            "variant": variant,
            "success": float(right_SQ.mean()),
            "low": low,
            "high": high,
            "by_seed": {result["seed"]: result["success"] for result in own},
        }
        if "spent" in own[0]:
            spent = {kind: _mean([one["spent"][kind] for one in own]) for kind in SPENT}
            trained = ("steps_a_batch", "iterations", "trained_tokens")
            row |= spent | {name: _mean([one[name] for one in own]) for name in trained}
        rows.append(row)
    return rows


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the table, one row per variant."""
    head = (
        *("variant", "success (%)", "by seed (%)", "steps a batch", "iterations"),
        *("sampled tokens", "tool calls", "environment steps", "trained tokens", "minutes"),
    )
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    for row in rows:
        mean, low, high = (100 * row[name] for name in ("success", "low", "high"))
        by_seed = ", ".join(f"{100 * value:.1f}" for value in row["by_seed"].values())
        cells = [row["variant"], f"{mean:.1f} [{low:.1f}, {high:.1f}]", by_seed]
        if "seconds" in row:
            counted = ("sampled_tokens", "tool_calls", "environment_steps", "trained_tokens")
            cells += [f"{row['steps_a_batch']:g}", f"{row['iterations']:.1f}"]
            cells += [*(f"{row[name]:,.0f}" for name in counted), f"{row['seconds'] / 60:.1f}"]
        else:
            cells += [""] * (len(head) - len(cells))
        lines.append(f"| {' | '.join(cells)} |".replace("  ", " "))
    return "\n".join(lines) + "\n"

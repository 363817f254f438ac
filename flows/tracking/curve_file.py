"""Read ``curve.csv``, the metrics of a training, as runs that were cut off or diverged leave it."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

OF_VALIDATION = "validation_"  # begins the columns of policies that were asked in training
NUMBER = "iteration"


def read(file: Path) -> dict[str, list[float | None]]:
    """Return measure -> a value a row; None where the cell is empty, or no finite number.

    {} for a file that is missing or has no rows. Raises ValueError for a cell that is no number.
    """
    if not file.is_file():
        return {}
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    names = [name for name in rows[0] if name] if rows else []
    return {
        name: [_number(file, line, name, row) for line, row in enumerate(rows, 2)] for name in names
    }


def _number(file: Path, line: int, name: str, row: Mapping[str, str | None]) -> float | None:
    text = row[name]
    try:
        value = float(text) if text else math.nan
    except ValueError:
        raise ValueError(
            f"{file}, line {line}: '{name}' is {text!r}, which is no number: restore the file "
            "(dvc checkout), or train again"
        ) from None
    return value if math.isfinite(value) else None


def of_training(curve: Mapping[str, Sequence[float | None]]) -> dict[str, list[float]]:
    """Return the rows that have metrics of training: measure -> values, NaN for gaps.

    Measures without a value are left out.
    The policy that the last iteration made was asked the validation questions and nothing else, so
    its row has no such metrics.
    """
    measures = [name for name in curve if name != NUMBER and not name.startswith(OF_VALIDATION)]
    rows = [
        row
        for row in range(len(curve.get(NUMBER, ())))
        if any(curve[name][row] is not None for name in measures)
    ]
    filled = {name: [_or_nan(curve[name][row]) for row in rows] for name in [NUMBER, *measures]}
    return {name: values for name, values in filled.items() if not all(map(math.isnan, values))}


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value

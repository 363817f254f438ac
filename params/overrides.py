"""Write the values of ``--set key=value`` into a recipe's file.

Only the characters of a value change; comments, order and layout of the file stay. A key that the
recipe leaves out, as it may, is added to its section, and so is one that the recipe's base has.
Keys that begin with ``algorithm.`` are choices of the row of ``algorithms.yaml`` that the recipe
names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from params import strict_yaml
from params.merging import merge
from params.schema.defaults import defaults, in_defaults
from params.short_overrides import base_of, replaced_in_short
from params.whole_file import BASE
from params.yaml_edits import replaced

OF_ROW = "algorithm."  # prefix of a choice of the recipe's algorithm


def apply_to(recipe: str, overrides: Sequence[str], folder: Path) -> None:
    """Write overrides into ``<folder>/<recipe>.yaml`` and its row of ``algorithms.yaml``.

    ``algorithm.estimator.lambda=0`` changes the row that ``reinforce.algorithm`` names once the
    other overrides are in place; a choice that the row leaves out is added to it. A row that does
    not exist is left to the schema. Raises ValueError as ``apply``; both files then stay.
    """
    of_row = [override for override in overrides if override.lstrip().startswith(OF_ROW)]
    file, table = folder / f"{recipe}.yaml", folder / "algorithms.yaml"
    changed = {file: _changed([one for one in overrides if one not in of_row], file)}
    row = _row_of(_whole(changed[file], file))
    if of_row and table.exists() and row in (strict_yaml.read(table) or {}):
        changed[table] = _changed(of_row, table, row)
    for target, text in changed.items():
        _write(text, target)


def apply(overrides: Sequence[str], file: Path) -> None:
    """Write overrides of the form ``section.key=value``, with the value as YAML, into ``file``.

    Raises ValueError with the override and the remedy for a missing "=", for a key that the recipe
    neither has nor may leave out, for a value that is not one YAML value, and for a file that is no
    sound YAML; the file then stays as it was. Types are not checked here: the schema does that.
    """
    _write(_changed(overrides, file), file)


def _row_of(values: Any) -> str:
    """Return the name of the algorithm in a parsed recipe; "" where it names none."""
    reinforce = values.get("reinforce") if isinstance(values, dict) else None
    row = reinforce.get("algorithm") if isinstance(reinforce, dict) else None
    return row if isinstance(row, str) else ""


def _changed(overrides: Sequence[str], file: Path, row: str = "") -> str:
    """Return the text of a file with overrides of its keys, or with ``row`` of that row's."""
    text = strict_yaml.read_text(file)
    for override in overrides:
        key, equals, value = (part.strip() for part in override.partition("="))
        if not equals or not key:
            raise ValueError(f"--set {override}: write it as section.key=value")
        path = [row, *key.removeprefix(OF_ROW).split(".")] if row else key.split(".")
        values = strict_yaml.parse(text, str(file))
        may_add = bool(row) or in_defaults(path) in defaults()
        where = f"--set {override}: {file}"
        if not row and isinstance(values, dict) and BASE in values:
            text = replaced_in_short(text, file, path, value, where, may_add)
        else:
            text = replaced(text, values, path, value, where, may_add)
    return text


def _whole(text: str, file: Path) -> Any:
    """Return the values of a recipe's text with those of its base."""
    values = strict_yaml.parse(text, str(file))
    if not isinstance(values, dict) or BASE not in values:
        return values
    return merge(base_of(values, file), values)


def _write(text: str, file: Path) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8", newline="")
    partial.replace(file)

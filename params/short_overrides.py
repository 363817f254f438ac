"""Write the values of ``--set key=value`` into a recipe with a base, which says what differs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from params import recipe_files, strict_yaml
from params.merging import KINDS, merge
from params.whole_file import BASE
from params.yaml_edits import edited, exchanged, find, one_value, value_at


def base_of(values: Any, file: Path) -> dict[str, Any]:
    """Return the values of the base that a recipe names, with those of its own bases."""
    recipe_files.resolve(file.stem, file.parent)  # which refuses bases that cannot be
    return recipe_files.read(values[BASE], file.parent)


def replaced_in_short(
    text: str, file: Path, path: Sequence[str], value: str, where: str, may_add: bool
) -> str:
    """Return the text of a recipe with a base, with which another value holds at ``path``."""
    own = strict_yaml.parse(text, str(file))
    base = base_of(own, file)
    holds = merge(base, own)
    if path[0] == BASE:
        raise ValueError(f"{where}: the base decides what the other keys are: edit the file")
    as_whole = json.dumps(holds)  # YAML, too, so that errors are those of a whole recipe
    section = tuple(path[:-1])
    if KINDS.get(section) == path[-1] and one_value(value, where) != value_at(holds, path):
        raise ValueError(
            f"{where}: another {path[-1]} has other keys: give the section as a whole, "
            f"{'.'.join(section)}={{{path[-1]}: {value}, ...}}"
        )
    find(as_whole, path[:-1] if may_add else path, where, above=may_add)
    new = one_value(value, where)
    expected = edited(holds, path, new)
    path, new, value = _up_to_lists(path, holds, expected, new, value)
    ways = [(new, value)]
    if value.startswith("{"):
        ways.append((_instead_of(value_at(holds, path), new), ""))
    for wanted, written in ways:
        changed = _with_entry(text, own, path, wanted, written)
        with suppress(ValueError):
            now = merge(base, strict_yaml.parse(changed, "it"))
            if now == expected or (new is None and edited(now, path, None) == expected):
                return changed
    remedy = (
        f"the base has more keys in '{'.'.join(path)}': set those that differ one by one"
        if len(ways) > 1
        else f"{value!r} is not one YAML value: put it in quotes"
    )
    raise ValueError(f"{where}: {remedy}")


def _up_to_lists(
    path: Sequence[str], holds: Any, expected: Any, new: Any, value: str
) -> tuple[list[str], Any, str]:
    """Return path, value and text of the list around an entry, which is replaced whole."""
    for depth in range(len(path)):
        if isinstance(value_at(holds, path[:depth]), list):
            whole = value_at(expected, path[:depth])
            return list(path[:depth]), whole, json.dumps(whole, ensure_ascii=False)
    return list(path), new, value


def _instead_of(before: Any, new: Any) -> Any:
    """Return a section with null for each key that the one before has, and it has not."""
    if not isinstance(before, dict) or not isinstance(new, dict):
        return new
    return {**new, **{key: None for key in before if key not in new}}


def _with_entry(text: str, own: Any, path: Sequence[str], new: Any, value: str) -> str:
    """Return a text with a value at a path, of which sections may be missing.

    ``value``: how it is written; "": as JSON, which is YAML, too.
    """
    written = value or json.dumps(new, ensure_ascii=False)
    depth = next((n for n in range(len(path)) if not _has(own, path[: n + 1])), len(path))
    node = find(text, path[:depth], "it")
    if depth == len(path):
        return exchanged(text, node, written)
    if not isinstance(node, yaml.MappingNode) or node.flow_style:
        for part in reversed(path[depth:]):
            new = {part: new}
        inner = {**value_at(own, path[:depth]), **new}
        return exchanged(text, node, json.dumps(inner, ensure_ascii=False))
    column = node.start_mark.column
    lines = [f"{' ' * (column + 2 * n)}{part}:" for n, part in enumerate(path[depth:])]
    entry = "\n".join(lines).lstrip() + f" {written}"
    if depth:
        at = node.start_mark.index
        return f"{text[:at]}{entry}\n{' ' * column}{text[at:]}"
    return f"{text.rstrip()}\n{entry}\n"


def _has(values: Any, path: Sequence[str]) -> bool:
    """Return whether values have something other than nothing at a path."""
    try:
        return value_at(values, path[:-1]) is not None and bool(
            value_at(values, path) is not None or path[-1] in value_at(values, path[:-1])
        )
    except (KeyError, IndexError, TypeError):
        return False

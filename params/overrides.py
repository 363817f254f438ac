"""Write the values of ``--set key=value`` into a recipe's file.

Only the characters of a value change; comments, order and layout of the file stay. A key that the
recipe leaves out, as it may, is added to its section, and so is one that the recipe's base has.
Keys that begin with ``algorithm.`` are choices of the row of ``algorithms.yaml`` that the recipe
names.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from params import recipe_files, strict_yaml
from params.merging import merge
from params.schema.defaults import defaults, in_defaults
from params.whole_file import BASE

OF_ROW = "algorithm."  # prefix of a choice of the recipe's algorithm
WHOLE = ", or give a section that is left out as a whole: <section>={key: value}"


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
            text = _replace_in_short(text, file, path, value, where, may_add)
        else:
            text = _replace(text, values, path, value, where, may_add)
    return text


def _whole(text: str, file: Path) -> Any:
    """Return the values of a recipe's text with those of its base."""
    values = strict_yaml.parse(text, str(file))
    if not isinstance(values, dict) or BASE not in values:
        return values
    return merge(_base_of(values, file), values)


def _base_of(values: Any, file: Path) -> dict[str, Any]:
    recipe_files.resolve(file.stem, file.parent)  # which refuses bases that cannot be
    return recipe_files.read(values[BASE], file.parent)


def _replace_in_short(
    text: str, file: Path, path: Sequence[str], value: str, where: str, may_add: bool
) -> str:
    """Return the text of a recipe with a base, with which another value holds at ``path``."""
    own = strict_yaml.parse(text, str(file))
    base = _base_of(own, file)
    holds = merge(base, own)
    if path[0] == BASE:
        raise ValueError(f"{where}: the base decides what the other keys are: edit the file")
    as_whole = json.dumps(holds)  # YAML, too, so that errors are those of a whole recipe
    _find(as_whole, path[:-1] if may_add else path, where, above=may_add)
    new = _parsed(value, where)
    expected = _edited(holds, path, new)
    path, new, value = _up_to_lists(path, holds, expected, new, value)
    ways = [(new, value)]
    if value.startswith("{"):
        ways.append((_instead_of(_value_at(holds, path), new), ""))
    for wanted, written in ways:
        changed = _with_entry(text, own, path, wanted, written)
        with suppress(ValueError):
            now = merge(base, strict_yaml.parse(changed, "it"))
            if now == expected or (new is None and _edited(now, path, None) == expected):
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
        if isinstance(_value_at(holds, path[:depth]), list):
            whole = _value_at(expected, path[:depth])
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
    node = _find(text, path[:depth], "it")
    if depth == len(path):
        return _exchanged(text, node, written)
    if not isinstance(node, yaml.MappingNode) or node.flow_style:
        for part in reversed(path[depth:]):
            new = {part: new}
        inner = {**_value_at(own, path[:depth]), **new}
        return _exchanged(text, node, json.dumps(inner, ensure_ascii=False))
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
        return _value_at(values, path[:-1]) is not None and bool(
            _value_at(values, path) is not None or path[-1] in _value_at(values, path[:-1])
        )
    except (KeyError, IndexError, TypeError):
        return False


def _value_at(values: Any, path: Sequence[str]) -> Any:
    """Return the value at a path of keys; None where there is none."""
    for part in path:
        try:
            values = values[_key(values, part)]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return values


def _write(text: str, file: Path) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8", newline="")
    partial.replace(file)


def _replace(
    text: str, values: Any, path: Sequence[str], value: str, where: str, may_add: bool
) -> str:
    """Return the text with another value at ``path``, and with the same ``values`` elsewhere."""
    above = _find(text, path[:-1], where, above=True) if may_add else None
    if isinstance(above, yaml.MappingNode) and path[-1] not in _entries(above):
        changed = _added(text, above, path[-1], value)
    else:
        changed = _exchanged(text, _find(text, path, where), value)
    expected, reason = _edited(values, path, _parsed(value, where)), ""
    try:
        if strict_yaml.parse(changed, "it") == expected:
            return changed
    except ValueError as error:
        reason = f" ({str(error).splitlines()[0]})"
    raise ValueError(f"{where}: {value!r} is not one YAML value: put it in quotes{reason}")


def _parsed(value: str, where: str) -> Any:
    try:
        return strict_yaml.parse(value, "it")
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{where}: {value!r} is not one YAML value: put it in quotes ({reason})"
        ) from None


def _exchanged(text: str, node: yaml.Node, value: str) -> str:
    """Return the text with another value in place of a node."""
    begin, end = node.start_mark.index, node.end_mark.index
    old = text[begin:end]
    tail = old[len(old.rstrip()) :]  # the end mark of a block is after the blank lines behind it
    space = " " if begin == end else ""  # there was nothing after the colon
    return text[:begin] + space + value + tail + text[end:]


def _added(text: str, node: yaml.MappingNode, key: str, value: str) -> str:
    """Return the text with a first entry added to a mapping, in its own style."""
    at = node.start_mark.index + bool(node.flow_style)  # of a flow mapping, behind its brace
    entry = f"{key}: {value}"
    if node.flow_style:
        return f"{text[:at]}{entry}{', ' if node.value else ''}{text[at:]}"
    return f"{text[:at]}{entry}\n{' ' * node.start_mark.column}{text[at:]}"


def _find(text: str, path: Sequence[str], where: str, above: bool = False) -> yaml.Node:
    """Return the YAML node of the value at a path of keys. Raises ValueError for none.

    ``above``: it is the section of the key that is asked for.
    """
    node = _composed(text)
    for depth, part in enumerate(path):
        entries = _entries(node)
        if part not in entries:
            section, key = ".".join(path[:depth]), ".".join(path)
            names = sorted({*entries, *_optional(path[:depth])})
            known = f"choose one of {names}" if entries else f"'{section}' is a single value"
            hint = WHOLE if above or depth < len(path) - 1 else ""
            raise ValueError(f"{where} has no key '{key}' ('{part}' is missing): {known}{hint}")
        node = entries[part]
    assert node
    return node


def _optional(path: Sequence[str]) -> list[str]:
    """Return the keys that a recipe may leave out of the section at a path."""
    split = (key.rpartition(".") for key in defaults())
    return [name for section, _, name in split if section == in_defaults(path)]


@functools.cache  # the overrides of many variants change the same few files
def _composed(text: str) -> yaml.Node | None:
    return yaml.compose(text, strict_yaml.Loader)


def _entries(node: yaml.Node | None) -> dict[str, yaml.Node]:
    """Return the values of a mapping by key, or of a list by number; {} for a single value."""
    if isinstance(node, yaml.MappingNode):
        return {name.value: entry for name, entry in node.value}
    if isinstance(node, yaml.SequenceNode):
        return {str(number): entry for number, entry in enumerate(node.value)}
    return {}


def _edited(values: Any, path: Sequence[str], value: Any) -> Any:
    """Return a copy of parsed YAML with another value at ``path``."""
    changed = copy.deepcopy(values)
    container = changed
    for part in path[:-1]:
        container = container[_key(container, part)]
    container[_key(container, path[-1])] = value
    return changed


def _key(container: Any, part: str) -> Any:
    return int(part) if isinstance(container, list) else part

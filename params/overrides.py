"""Write the values of ``--set key=value`` into a recipe's file.

Only the characters of a value change; comments, order and layout of the file stay. A key that the
recipe leaves out, as it may, is added to its section. Keys that begin with ``algorithm.`` are
choices of the row of ``algorithms.yaml`` that the recipe names.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from params import strict_yaml
from params.schema.defaults import defaults, in_defaults

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
    row = _row_of(strict_yaml.parse(changed[file], str(file)))
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
        text = _replace(text, values, path, value, f"--set {override}: {file}", may_add)
    return text


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
    try:
        expected = _edited(values, path, strict_yaml.parse(value, "it"))
        if strict_yaml.parse(changed, "it") == expected:
            return changed
        reason = ""
    except ValueError as error:
        reason = f" ({str(error).splitlines()[0]})"
    raise ValueError(f"{where}: {value!r} is not one YAML value: put it in quotes{reason}")


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

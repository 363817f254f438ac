"""Write the values of ``--set key=value`` into a recipe's file.

Only the characters of a value change; comments, order and layout of the file stay.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from params import strict_yaml


def apply(overrides: Sequence[str], file: Path) -> None:
    """Write overrides of the form ``section.key=value``, with the value as YAML, into ``file``.

    Raises ValueError with the override and the remedy for a missing "=", for a key that the recipe
    does not have, for a value that is not one YAML value, and for a file that is no sound YAML;
    the file then stays as it was. Types are not checked here: the schema does that.
    """
    text = strict_yaml.read_text(file)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"--set {override}: write it as section.key=value")
        values = strict_yaml.parse(text, str(file))
        text = _replace(text, values, key.strip(), value.strip(), f"--set {override}: {file}")
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8", newline="")
    partial.replace(file)


def _replace(text: str, values: Any, key: str, value: str, where: str) -> str:
    """Return the text with another value at ``key``, and with the same ``values`` elsewhere."""
    node = _find(text, key, where)
    begin, end = node.start_mark.index, node.end_mark.index
    old = text[begin:end]
    tail = old[len(old.rstrip()) :]  # the end mark of a block is after the blank lines behind it
    space = " " if begin == end else ""  # there was nothing after the colon
    changed = text[:begin] + space + value + tail + text[end:]
    try:
        wanted = _edited(values, key.split("."), strict_yaml.parse(value, "it"))
        if strict_yaml.parse(changed, "it") == wanted:
            return changed
        reason = ""
    except ValueError as error:
        reason = f" ({str(error).splitlines()[0]})"
    raise ValueError(f"{where}: {value!r} is not one YAML value: put it in quotes{reason}")


def _find(text: str, key: str, where: str) -> yaml.Node:
    """Return the YAML node of the value at a dotted key. Raises ValueError where there is none."""
    node = yaml.compose(text, strict_yaml.Loader)
    for place, part in enumerate(parts := key.split(".")):
        found = _entries(node)
        if part not in found:
            above = ".".join(parts[:place])
            known = f"choose one of {sorted(found)}" if found else f"'{above}' is a single value"
            raise ValueError(f"{where} has no key '{key}' ('{part}' is missing): {known}")
        node = found[part]
    assert node
    return node


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
    place = changed
    for part in path[:-1]:
        place = place[_key(place, part)]
    place[_key(place, path[-1])] = value
    return changed


def _key(place: Any, part: str) -> Any:
    return int(part) if isinstance(place, list) else part

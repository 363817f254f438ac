"""Changed values of a recipe, as ``--set key=value`` gives them, written into its file.

Only the characters of the value change: comments, order and layout of the file stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


def apply(overrides: Sequence[str], file: Path) -> None:
    """Write overrides, each ``section.key=value`` with the value as YAML, into a recipe's file.

    Raises ValueError that names the override and the remedy for one without a "=", for a key that
    the recipe does not have, and for a value that is not one YAML value. The types are for the
    schema to check. A fault leaves the file as it was.
    """
    text = file.read_text()
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"--set {override}: write it as section.key=value")
        text = _replace(text, key.strip(), value.strip(), f"--set {override}: {file}")
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text)
    partial.replace(file)


def _replace(text: str, key: str, value: str, where: str) -> str:
    """The text with another value at ``key``; nothing else in it may come out otherwise."""
    node = _find(text, key, where)
    begin, end = node.start_mark.index, node.end_mark.index
    old = text[begin:end]
    tail = old[len(old.rstrip()) :]  # a block's end mark stands at what comes after it
    space = " " if begin == end else ""  # nothing stood behind the colon
    changed = text[:begin] + space + value + tail + text[end:]
    try:
        wanted = _with(yaml.safe_load(text), key.split("."), yaml.safe_load(value))
        same = yaml.safe_load(changed) == wanted
    except yaml.YAMLError:
        same = False
    if not same:
        raise ValueError(f"{where}: {value!r} is not one YAML value: put it in quotes")
    return changed


def _find(text: str, key: str, where: str) -> yaml.Node:
    """The node of the value at a dotted key."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    for part in key.split("."):
        entries = node.value if isinstance(node, yaml.MappingNode) else []
        found = {name.value: entry for name, entry in entries}
        if part not in found:
            known = f"choose one of {sorted(found)}" if found else "its section has no keys"
            raise ValueError(f"{where} has no key '{key}' ('{part}' is not there): {known}")
        node = found[part]
    assert node
    return node


def _with(values: Any, path: Sequence[str], value: Any) -> Any:
    """Parsed YAML with another value at ``path``."""
    changed = copy.deepcopy(values)
    place = changed
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return changed

"""Change single values in the text of a YAML file; everything else in it stays."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from params import strict_yaml, suggestions
from params.schema.defaults import defaults, in_defaults

WHOLE = ", or give a section that is left out as a whole: <section>={key: value}"


def replaced(
    text: str, values: Any, path: Sequence[str], value: str, where: str, may_add: bool
) -> str:
    """Return the text with another value at ``path``, and with the same ``values`` elsewhere."""
    above = find(text, path[:-1], where, above=True) if may_add else None
    if isinstance(above, yaml.MappingNode) and path[-1] not in _entries(above):
        changed = _added(text, above, path[-1], value)
    else:
        changed = exchanged(text, find(text, path, where), value)
    expected, reason = edited(values, path, one_value(value, where)), ""
    try:
        if strict_yaml.parse(changed, "it") == expected:
            return changed
    except ValueError as error:
        reason = f" ({str(error).splitlines()[0]})"
    raise ValueError(f"{where}: {value!r} is not one YAML value: put it in quotes{reason}")


def one_value(value: str, where: str) -> Any:
    """Return what a text of YAML stands for; all of it has to be the value.

    Raises ValueError for one that YAML cannot read, or of which it would leave out a part.
    """
    try:
        parsed = strict_yaml.parse(value, "it")
        reason = _left_out(value)
    except ValueError as error:
        reason = str(error).splitlines()[0]
    if reason:
        raise ValueError(f"{where}: {value!r} is not one YAML value: put it in quotes ({reason})")
    return parsed


def _left_out(value: str) -> str:
    """Return which part of a text YAML takes for no part of its value; "" for none."""
    node = yaml.compose(value, strict_yaml.Loader)
    if node is None:
        return "it is a comment" if value.strip() else ""
    before, after = value[: node.start_mark.index].strip(), value[node.end_mark.index :].strip()
    if before or after:
        return f"{before or after!r} is no part of it"
    if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">") and "\n" not in value:
        return f"{value!r} announces lines that do not follow"
    return ""


def exchanged(text: str, node: yaml.Node, value: str) -> str:
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


def find(text: str, path: Sequence[str], where: str, above: bool = False) -> yaml.Node:
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
            there = [*_paths(_composed(text)), *defaults()]
            missing = ".".join(path[: depth + 1])
            meant = "" if part in names else suggestions.meant_key(missing, there)
            raise ValueError(
                f"{where} has no key '{key}' ('{part}' is missing): {known}{hint}{meant}"
            )
        node = entries[part]
    assert node
    return node


def _optional(path: Sequence[str]) -> list[str]:
    """Return the keys that a recipe may leave out of the section at a path."""
    split = (key.rpartition(".") for key in defaults())
    return [name for section, _, name in split if section == in_defaults(path)]


def _paths(node: yaml.Node | None, above: str = "") -> Iterator[str]:
    """Yield the dotted path of each key in a file."""
    for name, entry in _entries(node).items():
        yield f"{above}{name}"
        yield from _paths(entry, f"{above}{name}.")


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


def edited(values: Any, path: Sequence[str], value: Any) -> Any:
    """Return a copy of parsed YAML with another value at ``path``."""
    changed = copy.deepcopy(values)
    container = changed
    for part in path[:-1]:
        container = container[key_in(container, part)]
    container[key_in(container, path[-1])] = value
    return changed


def key_in(container: Any, part: str) -> Any:
    return int(part) if isinstance(container, list) else part


def value_at(values: Any, path: Sequence[str]) -> Any:
    """Return the value at a path of keys; None where there is none."""
    for part in path:
        try:
            values = values[key_in(values, part)]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return values

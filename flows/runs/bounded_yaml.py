"""Load YAML that others may have written, within bounds that are checked before it is built.

The loader of libyaml calls itself in C for each level: a text that nests deep enough ends the
process without a word. Aliases make a small text a large value. So the parser's events, which need
no memory, are counted first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

LARGEST = 2**24  # characters; dvc.lock of 20 recipes has 200,000
DEEPEST = 100  # levels; a recipe has 6, and Python's own JSON and DVC end at some 300
LONGEST = 2**16  # characters of one text; a number that long is still read in a second
MOST_VALUES = 500_000  # with what aliases stand for; dvc.lock of 20 recipes has 20,000


class DvcLoader(yaml.CSafeLoader):
    """PyYAML's loader, and 1e-05 is a number, as DVC writes it; YAML 1.1 takes it for a text."""


DvcLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


@dataclass
class _Part:
    """A list or mapping that is being read, or what an anchor stands for."""

    values: int = 1
    levels: int = 0


def load(text: str, name: str) -> Any:
    """Return the content of a YAML text; ValueError with ``name`` and the reason if it has none."""
    check(text, name)
    try:
        return yaml.load(text, Loader=DvcLoader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{name} cannot be read as YAML: {_first_line(error)}") from None


def check(text: str, name: str) -> None:
    """Raise ValueError for a text that is no YAML or exceeds a bound; build nothing of it."""
    if len(text) > LARGEST:
        raise ValueError(f"{name} has {len(text)} characters: at most {LARGEST} are read")
    try:
        fault = _fault(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{name} cannot be read as YAML: {_first_line(error)}") from None
    if fault:
        raise ValueError(f"{name} {fault}")


def _fault(text: str) -> str:
    """Return which bound a text exceeds, or ""."""
    anchors: dict[str, _Part] = {}
    above: list[tuple[str | None, _Part]] = [(None, _Part(0))]
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            above.append((event.anchor, _Part()))
            part = _Part(0)  # counted when it ends
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, part = above.pop()
            part.levels += 1
            anchors |= {anchor: part} if anchor else {}
        elif isinstance(event, yaml.ScalarEvent):
            if len(event.value) > LONGEST:
                return f"has a text of {len(event.value)} characters: at most {LONGEST} are read"
            part = _Part()
            anchors |= {event.anchor: part} if event.anchor else {}
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                return f"has the alias *{event.anchor} before its anchor has ended"
            part = anchors[event.anchor]
        else:
            continue
        inside = above[-1][1]
        inside.values += part.values
        inside.levels = max(inside.levels, part.levels)
        if len(above) - 1 + part.levels > DEEPEST:
            return f"nests deeper than {DEEPEST} levels"
        if inside.values > MOST_VALUES:
            return f"has more than {MOST_VALUES} values, with those that its aliases repeat"
    return ""


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]

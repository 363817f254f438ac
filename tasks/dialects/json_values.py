"""Values of JSON in calls and tools: objects that are written as texts, depth, quoting."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any


def object_of(value: Any) -> dict[str, Any] | None:
    """Return a JSON object, which may be written as a text; None for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def depth(value: Any) -> int:
    """Return how many levels a value of JSON has; a text or a number has 1."""
    levels, layer = 0, [value]
    while layer:
        levels += 1
        nested = [
            each.values() if isinstance(each, dict) else each
            for each in layer
            if isinstance(each, dict | list)
        ]
        layer = [inner for values in nested for inner in values]
    return levels


def quoted(value: Any, show: Callable[[str], str]) -> Any:
    """Quote every text of a JSON value, names included."""
    if isinstance(value, str):
        return show(value)
    if isinstance(value, Mapping):
        return {show(name): quoted(each, show) for name, each in value.items()}
    return [quoted(each, show) for each in value] if isinstance(value, list | tuple) else value

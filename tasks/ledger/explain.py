"""Explain why a sub-step runs again: what differs from the nearest earlier one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

SHOWN = 40  # characters of a value
Identities = Mapping[str, str]  # name of an argument -> what it contributes to a key


def differing(before: Identities, now: Identities) -> list[str]:
    """Names of the inputs that are not what they were, or that there were none of."""
    return [name for name in now if before.get(name) != now[name]]


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each difference of two records, of which ``inputs`` and ``sources`` are read."""
    lines: list[str] = []
    for name in differing(before["inputs"], now["inputs"]):
        if name == "source":
            old, new = before["sources"], now["sources"]
            files = [file for file in sorted({*old, *new}) if old.get(file) != new.get(file)]
            lines.append(f"source files: {', '.join(files)}")
        else:
            lines += _changed(name, before["inputs"].get(name), now["inputs"][name])
    return lines


def _changed(name: str, before: str | None, now: str) -> list[str]:
    old, new = ({} if identity is None else _flat(name, identity) for identity in (before, now))
    return [
        f"{path}: {_shown(old.get(path))} -> {_shown(new.get(path))}"
        for path in dict.fromkeys([*old, *new])
        if old.get(path) != new.get(path)
    ]


def _flat(path: str, identity: Any) -> dict[str, str]:
    """The single values in an identity, by dotted path; a digest or a list is one value."""
    value = identity
    if isinstance(identity, str):
        with suppress(ValueError):
            value = json.loads(identity)
    if not isinstance(value, dict):
        return {path: identity if isinstance(identity, str) else json.dumps(identity)}
    return {k: v for name, part in value.items() for k, v in _flat(f"{path}.{name}", part).items()}


def _shown(value: str | None) -> str:
    if value is None:
        return "nothing"
    return value if len(value) <= SHOWN else f"{value[:SHOWN]}..."

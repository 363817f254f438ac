"""Explain why a sub-step runs: what differs from the most similar earlier one, what is reused."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.ledger import records

SHOWN = 40  # characters of a value
Identities = Mapping[str, str]  # name of an input -> what it contributes to a key


def report(
    folder: Path, iteration: int, verb: str, reused: Collection[str], made_of: Mapping[str, Any]
) -> str:
    """Return why the first new sub-step of a stage runs; "" in a fresh run.

    ``folder`` holds the stage's sub-steps; ``reused`` has the names of those found so far;
    ``made_of`` has the ``inputs`` and ``sources`` of the sub-step that runs.
    """
    at = f"{folder.name}: {verb} of iteration {iteration}"
    whole = {int(name.partition("-")[0]) for name in reused} - {iteration}
    reuse = f"{len(reused)} sub-steps ({len(whole)} whole iterations) are reused"
    if older := _nearest(folder, iteration, verb, reused, made_of["inputs"]):
        lines = "".join(f"  {line}\n" for line in changes(older, made_of))
        return f"{at} runs again; {reuse}. Changes since:\n{lines}"
    return f"{at} is next; {reuse}\n" if reused else ""


def _nearest(
    folder: Path, iteration: int, verb: str, reused: Collection[str], inputs: Identities
) -> dict[str, Any] | None:
    """Return the earlier record of this sub-step that differs in the fewest inputs, or None."""
    older_records = []
    for path in sorted(folder.glob(f"{iteration:04d}-{verb}-*")):
        with suppress(OSError, ValueError):
            if path.name not in reused and (record := records.load(path)):
                older_records.append(record)
    return min(older_records, key=lambda r: len(differing(r["inputs"], inputs)), default=None)


def differing(before: Identities, now: Identities) -> list[str]:
    """Return the names of the inputs that are new or have another identity."""
    return [name for name in now if before.get(name) != now[name]]


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line for each difference of ``inputs`` and ``sources`` between two records."""
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
    """Return the values in an identity by dotted path; a digest or a list is a single value."""
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

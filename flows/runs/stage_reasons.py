"""Say in words why DVC would run a stage: settings first, then data, and code last."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.ledger.keys import ROOMS

Params = Mapping[str, Mapping[str, Any]]  # file -> key -> value
SHOWN = 60  # characters of a value
SHOWN_NAMES = 4  # files of code, and rows of a table; settings and data are always named
SHOWN_ROWS = 2  # rows of a table whose values are shown
USERS = ("data/sources", "own", "params/prompts")  # files that a user writes
HOW = {"deleted": "missing", "modified": "changed", "new": "new"}  # DVC's words -> ours
OUTS = "changed outs"  # of DVC's status


def reasons(changes: Sequence[Any], before: Params, now: Params) -> list[str]:
    """Return the reasons of a stage, the ones of a user first; each names its values or files.

    ``changes`` is DVC's report, such as [{"changed deps": {"params/a.yaml": {"seed": "modified"}}},
    "changed command"]; ``before`` and ``now`` are the stage's parameters.
    """
    texts = [change for change in changes if isinstance(change, str)]
    settings: list[str] = []
    data: list[str] = []
    made: list[str] = []
    results: list[str] = []
    code: list[str] = []
    for kind, path, how in _paths(changes):
        if isinstance(how, dict):
            settings += _settings(path, how, before.get(path, {}), now.get(path, {}))
        elif kind == OUTS:
            results.append(f"{path} {HOW.get(how, how)}")
        elif is_code(path) and Path(path).parts[0] != "own":
            code.append(path)
        else:
            of_user = path.startswith(USERS)
            (data if of_user else made).append(f"{path} {HOW.get(how, how)}")
    return [
        *settings,
        *_listed("data", data),
        *_listed("from earlier stages", made),
        *_listed("results", results),
        *_named("code", code),
        *texts,
    ]


def is_code(path: str) -> bool:
    """Return whether a dependency of a stage is code: a Python file, or a folder of them."""
    dependency = Path(path)
    return dependency.suffix == ".py" or (dependency.parts[0] in ROOMS and not dependency.suffix)


def _paths(changes: Sequence[Any]) -> Iterator[tuple[str, str, Any]]:
    for change in changes:
        if not isinstance(change, str):
            for kind, paths in change.items():
                for path, how in paths.items():
                    yield kind, path, how


def _settings(
    path: str, keys: Mapping[str, str], before: Mapping[str, Any], now: Mapping[str, Any]
) -> list[str]:
    """Return a line for each value that differs below the keys; of tables with the file's name.

    Of a table, rows that are new or gone are named, and the values of a few others.
    """
    if path.startswith("params/") and _is_recipe(path):
        return _values("", keys, before, now)
    file = f"{Path(path).name} "
    new = [row for row in keys if before.get(row) is None and now.get(row) is not None]
    gone = [row for row in keys if before.get(row) is not None and now.get(row) is None]
    others = [row for row in keys if row not in new and row not in gone]
    return [
        *_values(file, {row: keys[row] for row in others[:SHOWN_ROWS]}, before, now),
        *_named(f"{file}rows changed, too", others[SHOWN_ROWS:]),
        *_named(f"{file}new rows", new),
        *_named(f"{file}rows gone", gone),
    ]


def _values(
    file: str, keys: Mapping[str, str], before: Mapping[str, Any], now: Mapping[str, Any]
) -> list[str]:
    lines = []
    for key in keys:
        old, new = _flat(key, before.get(key)), _flat(key, now.get(key))
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        lines += [f"{file}{n}: {_shown(old.get(n))} -> {_shown(new.get(n))}" for n in names]
        if not names:
            lines.append(f"{file}{key}: {keys[key]}")
    return lines


def _is_recipe(path: str) -> bool:
    from params.schema.recipe import TABLES  # half a second, which others have spent

    return Path(path).stem not in TABLES


def _flat(path: str, value: Any) -> dict[str, str]:
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        parts = enumerate(value)
        value = {k: v for i, p in parts for k, v in (p if len(p) == 1 else {str(i): p}).items()}
    if isinstance(value, dict) and value:
        return {
            k: v for name, part in value.items() for k, v in _flat(f"{path}.{name}", part).items()
        }
    return {path: value if isinstance(value, str) else json.dumps(value, default=str)}


def _shown(value: str | None) -> str:
    if value is None or value == "null":
        return "nothing" if value is None else "null"
    return value if len(value) <= SHOWN else f"{value[:SHOWN]}..."


def _listed(label: str, names: Sequence[str]) -> list[str]:
    return [f"{label}: {', '.join(names)}"] if names else []


def _named(label: str, names: Sequence[str]) -> list[str]:
    """Return a line with the first few names and the number of the others; none for no names."""
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return [f"{label}: {', '.join(names[:SHOWN_NAMES])}{more}"] if names else []

"""Explain why a sub-step runs: what differs from the most similar earlier one, what is reused.

Settings are named as in the recipe (tasks/ledger/recipe_names.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.ledger import records
from tasks.ledger.recipe_names import MADE, recipe_name

SHOWN = 40  # characters of a value
SHOWN_FILES = 4  # source files; parameters and data are always named
DIGEST = re.compile(r"[0-9a-f]{32}([0-9a-f]{32})?")
USERS_FILES = "data/sources/"
NAMED = re.compile(r"(?:agent\.sources|sources|named|scorers)\.(.+)")  # what a recipe names
Identities = Mapping[str, str]  # name of an input -> what it contributes to a key


def report(
    folder: Path,
    at: tuple[str, int, str],
    reused: Collection[str],
    made_of: Mapping[str, Any],
    files: Mapping[str, str],
) -> str:
    """Return why the first new sub-step of a stage runs; "" in a fresh run.

    ``folder`` holds the stage's sub-steps; ``at`` is stage, iteration and verb of the one that
    runs; ``reused`` has the names of those found so far; ``made_of`` has its ``inputs`` and
    ``sources``; ``files`` has the paths of its inputs by digest.
    """
    stage, iteration, verb = at
    older = _nearest(folder, iteration, verb, reused, made_of["inputs"])
    name = stage if stage == verb else f"{stage}: {verb}"
    what = name + _of_iteration(folder, iteration)
    if older:
        lines = "".join(f"  {line}\n" for line in changes(older, made_of, at, files))
        return f"{what} is computed again{_reuse(reused, iteration)}. What has changed:\n{lines}"
    return f"{what} is next{_reuse(reused, iteration)}\n" if reused else ""


def _of_iteration(folder: Path, iteration: int) -> str:
    """Return which iteration it is, where the stage has several."""
    numbered = any(not path.name.startswith("0000-") for path in folder.glob("[0-9]*-*"))
    return f" of iteration {iteration}" if iteration or numbered else ""


def _reuse(reused: Collection[str], iteration: int) -> str:
    """Return how much of the stage is reused: sub-steps, and the iterations that they make up."""
    if not reused:
        return ""
    whole = {int(name.partition("-")[0]) for name in reused} - {iteration}
    sub_steps = f"{len(reused)} earlier sub-step{'s' * (len(reused) > 1)}"
    iterations = f", {len(whole)} whole iteration{'s' * (len(whole) > 1)}," if whole else ""
    return f"; {sub_steps}{iterations} {'are' if len(reused) > 1 else 'is'} reused"


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


def changes(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    at: tuple[str, int, str] = ("", 0, ""),
    files: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the differences of ``inputs`` and ``sources`` between two records as lines.

    Settings come first, by the recipe's names, then the user's files, what was made before, and
    the code.
    """
    settings: list[str] = []
    data: list[str] = []
    made: list[str] = []
    code: list[str] = []
    for path, was, is_now in _different_values(before["inputs"], now["inputs"]):
        if named := NAMED.fullmatch(path):
            code.append(f"the files of {named[1]}")
        elif _digests(was) or _digests(is_now):
            users = _users_files(path, was, is_now, files or {})
            data += users
            made += [] if users else [MADE.get(path.partition(".")[0], path)]
        else:
            label = recipe_name(path, at[0], at[2])
            settings.append(f"{label}: {_shown(was)} -> {_shown(is_now)}")
    return [
        *dict.fromkeys(settings),
        *_listed("data", data),
        *_listed("made anew by earlier steps", made),
        *_code(code, before["sources"], now["sources"]),
    ]


def _different_values(
    before: Identities, now: Identities
) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield path, old and new value of each value that differs; code is none of them."""
    for name in differing(before, now):
        if name != "source":
            old, new = (_flat(name, inputs.get(name)) for inputs in (before, now))
            for path in dict.fromkeys([*old, *new]):
                if old.get(path) != new.get(path):
                    yield path, old.get(path), new.get(path)


def _listed(label: str, names: Sequence[str]) -> list[str]:
    return [f"{label}: {', '.join(dict.fromkeys(names))}"] if names else []


def _code(named: Sequence[str], before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    files = [file for file in sorted({*before, *now}) if before.get(file) != now.get(file)]
    more = f" and {len(files) - SHOWN_FILES} more files" if len(files) > SHOWN_FILES else ""
    names = [*dict.fromkeys(named), *files[:SHOWN_FILES]]
    return [f"code: {', '.join(names)}{more}"] if names else []


def _digests(value: str | None) -> list[str]:
    """Return the digests that a value is, one or a list; [] for another value."""
    if value is None:
        return []
    if DIGEST.fullmatch(value):
        return [value]
    with suppress(ValueError):
        entries = json.loads(value)
        entries = entries if isinstance(entries, list) else [entries]
        if all(isinstance(one, str) and DIGEST.fullmatch(one) for one in entries):
            return list(entries)
    return []


def _users_files(
    name: str, before: str | None, now: str | None, files: Mapping[str, str]
) -> list[str]:
    """Return which of the user's files are new or changed, or that some are gone."""
    old, new = _digests(before), _digests(now)
    paths = [files[digest] for digest in new if digest not in old and digest in files]
    if name == "sources" and not paths:
        return [f"{len(set(old) - set(new))} of the files in {USERS_FILES} gone"]
    return [path for path in paths if path.startswith(USERS_FILES)]


def _flat(path: str, identity: Any) -> dict[str, str]:
    """Return the values in an identity by dotted path; a digest or a list is a single value.

    Objects in a list count by their only key, or by their place.
    """
    if identity is None:
        return {}
    value = identity
    if isinstance(identity, str):
        with suppress(ValueError):
            value = json.loads(identity)
    if isinstance(value, list) and (parts := _parts(value)):
        value = parts
    if not isinstance(value, dict):
        return {path: identity if isinstance(identity, str) else json.dumps(identity)}
    return {
        k: v
        for name, part in value.items()
        for k, v in _flat(f"{path}.{name}", json.dumps(part) if part is None else part).items()
    }


def _parts(values: Sequence[Any]) -> dict[str, Any]:
    """Return the objects of a list by name; {} where it has anything else."""
    parsed = []
    for value in values:
        with suppress(ValueError, TypeError):
            parsed.append(json.loads(value) if isinstance(value, str) else value)
    if not parsed or len(parsed) < len(values) or not all(isinstance(p, dict) for p in parsed):
        return {}
    named: dict[str, Any] = {}
    for place, part in enumerate(parsed):
        named |= part if len(part) == 1 else {str(place): part}
    return named


def _shown(value: str | None) -> str:
    if value is None:
        return "nothing"
    with suppress(ValueError):
        text = json.loads(value)
        value = text if isinstance(text, str) and text else value
    return value if len(value) <= SHOWN else f"{value[:SHOWN]}..."

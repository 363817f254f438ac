"""Find the first stage, iteration and sub-step in which two runs differ, and its inputs.

Two checkouts are compared by the digests in dvc.lock and in ``data/<recipe>/records``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from flows.runs import cache, file_difference, git, pipeline
from flows.runs.file_difference import NOTHING, ChangedValue, shown
from params.run_folders import RunFolders


class _Line(BaseModel):
    """What is read of a line; there may be more in it."""

    model_config = ConfigDict(strict=True, extra="allow")

    stage: str
    iteration: int
    verb: str
    key: str = ""
    inputs: dict[str, Any] = {}
    artifacts: dict[str, str] = {}
    questions: list[str] = []


Lock = Mapping[str, Any]  # the entry of a stage in dvc.lock
BYTECODE = "__pycache__"  # which DVC ignores, too


@dataclass(frozen=True)
class StageDifference:
    """The first stage that differs, and what differs in it."""

    stage: str
    inputs: list[ChangedValue]  # of the stage: parameters, data, source files
    outs: list[ChangedValue]
    sub_step: str = ""  # the first that differs, where the stage has records
    details: Sequence[ChangedValue] = ()  # of that sub-step

    def __str__(self) -> str:
        where = f"{self.stage}, {self.sub_step}" if self.sub_step else self.stage
        lines = [f"differs first at {where}"]
        lines += [f"  {change}" for change in self.details]
        lines += [f"  input {change}" for change in self.inputs]
        outs = [f"  out {change}" for change in self.outs]
        return "\n".join(lines + (outs or ["  the outs are the same"]))


def first_difference(
    stages: Sequence[str], before: Path, now: Path, commit: str
) -> StageDifference | None:
    """Compare the stages of two checkouts in their order; return the first difference, or None.

    ``commit``: that of ``before``; earlier states of the inputs are looked up in its history.
    Comments and docstrings of sources are no difference, as they are in no key of the ledger.
    """
    locks = pipeline.locked(before), pipeline.locked(now)
    for stage in stages:
        old, new = (lock.get(stage, {}) for lock in locks)
        inputs = _inputs(old, new, now, commit)
        outs = _changed(_digests(old, "outs"), _digests(new, "outs"))
        name, _, recipe = stage.partition("@")
        file = RunFolders(recipe).records(name)
        sub_step, details = _first_record(_records(before / file), _records(now / file))
        if inputs or outs or sub_step:
            return StageDifference(stage, inputs, outs, sub_step, details)
    return None


def _inputs(old: Lock, new: Lock, now: Path, commit: str) -> list[ChangedValue]:
    """Return the parameters and files that a stage reads and that have changed."""
    changes = [] if old.get("cmd") == new.get("cmd") else [_change("cmd", old, new)]
    changes += _changed(_parameters(old), _parameters(new))
    before, after = _digests(old, "deps"), _digests(new, "deps")
    for change in _changed(before, after):
        if difference := _within(change, before.get(change.name, ""), now, commit):
            changes.append(difference)
    return changes


def _parameters(lock: Lock) -> dict[str, Any]:
    """Return each single parameter: "params/toy.yaml reinforce.update.epochs" -> 1."""
    return {
        f"{file} {key}": value
        for file, sections in lock.get("params", {}).items()
        for key, value in _flat(sections).items()
    }


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{key}.{inner}": part for inner, part in _flat(value).items()}
        else:
            flat[key] = value
    return flat


def _digests(lock: Lock, kind: str) -> dict[str, str]:
    return {entry["path"]: entry.get("md5", NOTHING) for entry in lock.get(kind, [])}


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[ChangedValue]:
    names = dict.fromkeys([*before, *now])
    return [_change(name, before, now) for name in names if before.get(name) != now.get(name)]


def _change(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> ChangedValue:
    return ChangedValue(name, *(shown(values.get(name, NOTHING)) for values in (before, now)))


# ---------------------------------------------------------------- sub-steps


def parsed_records(lines: str) -> list[dict[str, Any]]:
    """Parse the records of a stage's sub-steps, as artifacts.publish_records writes them.

    Raises ValueError with the number of the first line that is none.
    """
    records = []
    for number, line in enumerate(lines.splitlines(), 1):
        try:
            records.append(_Line.model_validate_json(line).model_dump(exclude_unset=True))
        except ValueError:
            raise ValueError(f"line {number} is no record of a sub-step") from None
    return records


def _records(file: Path) -> list[dict[str, Any]]:
    try:
        return parsed_records(file.read_text()) if file.exists() else []
    except ValueError as error:
        raise ValueError(f"{file}: {error}; `dvc checkout {file}` brings it back") from None


def _first_record(
    before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> tuple[str, list[ChangedValue]]:
    """Return the first sub-step that differs, its changed inputs, then its artifacts."""
    for number in range(max(len(before), len(now))):
        old, new = (dict(some[number]) if number < len(some) else {} for some in (before, now))
        if old == new:
            continue
        if not old or not new or _name(old) != _name(new):
            named = [_name(record) if record else NOTHING for record in (old, new)]
            return _name(old or new), [ChangedValue("sub-step", *named)]
        return _name(old), _of_record(old, new)
    return "", []


def _name(record: Mapping[str, Any]) -> str:
    attempt = f" (attempt {record['attempt']})" if record.get("attempt") else ""
    stage = record["stage"]
    path = f"{stage.partition('/')[2]}, " if "/" in stage else ""  # "evaluate/trained"
    return f"{path}iteration {record['iteration']}, {record['verb']}{attempt}"


def _of_record(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[ChangedValue]:
    changes: list[ChangedValue] = []
    for kind, name in (("inputs", "input"), ("artifacts", "artifact")):
        values = [
            _flat({key: _parsed(value) for key, value in record.get(kind, {}).items()})
            for record in (old, new)
        ]
        changes += [ChangedValue(f"{name} {c.name}", c.before, c.now) for c in _changed(*values)]
    rest = [
        {key: value for key, value in record.items() if key not in ("inputs", "artifacts", "key")}
        for record in (old, new)
    ]
    return changes + _changed(*rest)


def _parsed(identity: Any) -> Any:
    """Parse a section of the recipe, which a record holds as JSON; leave digests as they are."""
    if isinstance(identity, str) and identity.startswith("{"):
        return json.loads(identity)
    return identity


# ---------------------------------------------------------------- within a file


def _within(change: ChangedValue, digest: str, now: Path, commit: str) -> ChangedValue | None:
    """Return the first line or row that differs in a file, or in the files of a folder.

    ``digest``: DVC's, of the earlier state. Returns the change as it is where that state is not
    known, and None for sources that differ in comments and docstrings alone.
    """
    path = change.name
    before, after = _earlier(path, digest, commit), _present(path, now)
    if before is None or not after:
        return change
    if difference := file_difference.in_files(before, after):
        return difference
    differing = [name for name in before if before[name] != after[name]]
    return None if all(name.endswith(".py") for name in differing) else change


def _earlier(path: str, digest: str, commit: str) -> dict[str, bytes] | None:
    """Return the earlier content of a file, or of each file of a folder, by path."""
    if digest.endswith(".dir"):
        folder = git.folder_with_digest(path, digest, commit)
        return folder and {f"{path}/{name}": content for name, content in folder.items()}
    content = cache.with_digest(path, digest, commit) if digest else None
    return None if content is None else {path: content}


def _present(path: str, root: Path) -> dict[str, bytes]:
    """Return the present content of a file, or of each file of a folder, by path."""
    full_path = root / path
    every = [full_path] if full_path.is_file() else sorted(full_path.rglob("*"))
    files = [file for file in every if file.is_file() and BYTECODE not in file.parts]
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in files}

"""Where two runs of the same stages part: the first stage, iteration and sub-step, and its inputs.

Two checkouts are compared by what dvc.lock and ``data/<recipe>/records`` say, digest by digest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flows.runs import cache, git, pipeline

Lock = Mapping[str, Any]  # what dvc.lock says of a stage
NOTHING = "nothing"
SHOWN = 120  # characters of a value
CONTEXT = 20  # characters of a long value before those that differ


@dataclass(frozen=True)
class Change:
    """A value that is not what it was."""

    name: str  # "params/toy.yaml seed", "artifact policy"
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.name}: was {self.before}, is {self.now}"


@dataclass(frozen=True)
class Difference:
    """The first stage that differs, and how."""

    stage: str
    inputs: list[Change]  # of the stage: parameters, data, source files
    outs: list[Change]
    sub_step: str = ""  # the first that differs, where the stage has records
    details: Sequence[Change] = ()  # of that sub-step

    def __str__(self) -> str:
        where = f"{self.stage}, {self.sub_step}" if self.sub_step else self.stage
        lines = [f"differs first at {where}"]
        lines += [f"  {change}" for change in self.details]
        lines += [f"  input {change}" for change in self.inputs]
        outs = [f"  out {change}" for change in self.outs]
        return "\n".join(lines + (outs or ["  the outs are the same"]))


def first_difference(
    stages: Sequence[str], before: Path, now: Path, commit: str
) -> Difference | None:
    """Compare the stages, in their order, of two checkouts; None where all digests are the same.

    ``commit`` is the one that ``before`` is of: its history has earlier states of the inputs.
    """
    locks = pipeline.locked(before), pipeline.locked(now)
    for stage in stages:
        old, new = (lock.get(stage, {}) for lock in locks)
        inputs = _inputs(old, new, now, commit)
        outs = _changed(_digests(old, "outs"), _digests(new, "outs"))
        name, _, recipe = stage.partition("@")
        file = Path("data", recipe, "records", f"{name}.jsonl")
        sub_step, details = _first_record(_records(before / file), _records(now / file))
        if inputs or outs or sub_step:
            return Difference(stage, inputs, outs, sub_step, details)
    return None


def _inputs(old: Lock, new: Lock, now: Path, commit: str) -> list[Change]:
    """Parameters and files that a stage was given and that are not what they were."""
    changes = [] if old.get("cmd") == new.get("cmd") else [_change("cmd", old, new)]
    changes += _changed(_parameters(old), _parameters(new))
    before, after = _digests(old, "deps"), _digests(new, "deps")
    for change in _changed(before, after):
        found = _within(change.name, before.get(change.name, ""), now, commit)
        changes.append(found or change)
    return changes


def _parameters(lock: Lock) -> dict[str, Any]:
    """Each single parameter: "params/toy.yaml reinforce.update.epochs" -> 1."""
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


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    names = dict.fromkeys([*before, *now])
    return [_change(name, before, now) for name in names if before.get(name) != now.get(name)]


def _change(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Change:
    return Change(name, *(_shown(values.get(name, NOTHING)) for values in (before, now)))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _shown(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


# ---------------------------------------------------------------- sub-steps


def parsed_records(lines: str) -> list[dict[str, Any]]:
    """The records of the sub-steps of a stage, as ledger.publish_records writes them."""
    return [json.loads(line) for line in lines.splitlines()]


def _records(file: Path) -> list[dict[str, Any]]:
    return parsed_records(file.read_text()) if file.exists() else []


def _first_record(
    before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> tuple[str, list[Change]]:
    """The first sub-step that differs, and what of it: its inputs, then what it made of them."""
    for number in range(max(len(before), len(now))):
        old, new = (dict(some[number]) if number < len(some) else {} for some in (before, now))
        if old == new:
            continue
        if not old or not new or _name(old) != _name(new):
            named = [_name(record) if record else NOTHING for record in (old, new)]
            return _name(old or new), [Change("sub-step", *named)]
        return _name(old), _of_record(old, new)
    return "", []


def _name(record: Mapping[str, Any]) -> str:
    attempt = f" (attempt {record['attempt']})" if record.get("attempt") else ""
    stage = record["stage"]
    path = f"{stage.partition('/')[2]}, " if "/" in stage else ""  # "evaluate/trained"
    return f"{path}iteration {record['iteration']}, {record['verb']}{attempt}"


def _of_record(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    changes: list[Change] = []
    for kind, name in (("inputs", "input"), ("artifacts", "artifact")):
        values = [
            _flat({key: _parsed(value) for key, value in record.get(kind, {}).items()})
            for record in (old, new)
        ]
        changes += [Change(f"{name} {c.name}", c.before, c.now) for c in _changed(*values)]
    rest = [
        {key: value for key, value in record.items() if key not in ("inputs", "artifacts", "key")}
        for record in (old, new)
    ]
    return changes + _changed(*rest)


def _parsed(identity: Any) -> Any:
    """A section of the recipe stands in a record as JSON; a digest does not."""
    if isinstance(identity, str) and identity.startswith("{"):
        return json.loads(identity)
    return identity


# ---------------------------------------------------------------- within a file


def _within(path: str, digest: str, now: Path, commit: str) -> Change | None:
    """The first line or row that differs of a file, or of a file in a folder.

    None where the earlier state is not known.
    """
    if digest.endswith(".dir"):
        folder = git.folder_with_digest(path, digest, commit)
        return None if folder is None else _within_folder(path, folder, now / path)
    before = cache.with_digest(path, digest, commit) if digest else None
    if before is None or not (now / path).is_file():
        return None
    return _within_file(path, before, (now / path).read_bytes())


def _within_folder(folder: str, before: Mapping[str, bytes], now: Path) -> Change | None:
    files = {str(file.relative_to(now)) for file in now.rglob("*") if file.is_file()}
    for name in sorted({*before, *files}):
        path = f"{folder}/{name}"
        if (name in before) != (name in files):
            was, there = ("a file" if name in some else NOTHING for some in (before, files))
            return Change(path, was, there)
        if found := _within_file(path, before[name], (now / name).read_bytes()):
            return found
    return None


def _within_file(file: str, before: bytes, now: bytes) -> Change | None:
    suffix = Path(file).suffix
    rows = ROWS.get(suffix, _lines)
    old, new = rows(before), rows(now)
    for number in range(max(len(old), len(new))):
        pair = [_text(some[number]) if number < len(some) else NOTHING for some in (old, new)]
        if pair[0] != pair[1]:
            where = f"{file}, {WORDS.get(suffix, 'line')} {number + 1}"
            return Change(where, *_parting(*pair))
    return None


def _parting(before: str, now: str) -> tuple[str, str]:
    """Two texts that differ, as far as they are shown: long ones from where they begin to."""
    begin = 0
    if max(len(before), len(now)) > SHOWN:
        shorter = min(len(before), len(now))
        same = next((i for i in range(shorter) if before[i] != now[i]), shorter)
        begin = max(0, same - CONTEXT)
    mark = "…" if begin else ""
    return mark + _shown(before[begin:]), mark + _shown(now[begin:])


def _lines(content: bytes) -> list[Any]:
    return content.decode(errors="replace").splitlines()


def _parquet(content: bytes) -> list[Any]:
    return pq.read_table(pa.BufferReader(content)).to_pylist()


ROWS: dict[str, Callable[[bytes], list[Any]]] = {".parquet": _parquet}
WORDS = {".parquet": "row", ".jsonl": "row", ".csv": "row"}

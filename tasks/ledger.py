"""The store of finished sub-steps: what each was made from, and what it made.

A sub-step (the rollout of iteration 3, say) writes into a folder of its own. When it has ended, its
record is added and the folder gets its name by one rename, so a name never holds half a result. The
name ends with the sub-step's key: a digest of everything that decides the outcome, namely the
arguments that hold values, the digests of the artifacts it reads, and the source of its module with
all project files that it imports. A run that was killed finds what it had finished; anything that
changed gets a new key.

Prefect's cache asks ``cache_key`` and keeps the same record as its stored result, so that the UI
shows a sub-step that was found here as cached. The record in the folder is the truth.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

ROOT = Path(".beamline/ledger")
PROJECT = Path(__file__).resolve().parent.parent
ROOMS = ("flows", "tasks", "params")
KEY_LETTERS = 16
RETIRED = "retired"  # a file that says: the artifacts here have been pruned on purpose

Record = dict[str, Any]


@dataclass(frozen=True)
class Artifact:
    """A file or a folder, and the digest of what is in it. Equal digests mean equal content."""

    path: str
    digest: str


@dataclass(frozen=True)
class Step:
    """Where a sub-step stands: its recipe, stage and iteration, and the seed of its draws."""

    recipe: str
    stage: str
    iteration: int
    seed: int

    @property
    def folder(self) -> Path:
        """Where the sub-steps of this stage are kept."""
        return ROOT / self.recipe / self.stage


def artifact(path: Path) -> Artifact:
    """The artifact at ``path`` as it is now."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: run the stage that makes it first")
    return Artifact(str(path), digest(path))


def of(record: Record, name: str) -> Artifact:
    """The artifact ``name`` that a sub-step has made."""
    return Artifact(**record["artifacts"][name])


def digest(path: Path) -> str:
    """Digest of a file's bytes, or of a folder's file names and bytes. Hexadecimal, 32 letters."""
    state = hashlib.blake2b(digest_size=16)
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in files:
        state.update(str(file.relative_to(path)).encode() + b"\0")
        with file.open("rb") as stream:
            state.update(hashlib.file_digest(stream, "blake2b").digest())
    return state.hexdigest()


# ---------------------------------------------------------------- records


class PrunedError(RuntimeError):
    """Something is needed that ``retire`` has dropped: ``revive`` lets it be made again."""


def _need(made: Artifact) -> None:
    path = Path(made.path)
    if path.is_relative_to(ROOT) and not path.exists():
        raise PrunedError(f"{made.path} has been pruned, and is needed again")


def recorded(compute: Callable[..., Mapping[str, Any]]) -> Callable[..., Record]:
    """Turn a function that fills a folder into a sub-step that is done once.

    ``compute(step, folder, ...)`` writes its artifacts into ``folder`` and returns what the record
    shall say beside them (metrics, seconds by part). The sub-step is called without ``folder`` and
    returns the record; a finished one is read back instead of computed. It raises PrunedError where
    an artifact that it must read is gone.
    """
    source = inspect.getsourcefile(compute)
    assert source
    verb = compute.__name__

    def inputs(arguments: Mapping[str, Any]) -> dict[str, str]:
        values = {name: _identity(value) for name, value in sorted(arguments.items())}
        known = {name: value for name, value in values.items() if value is not None}
        return {**known, "source": source_digest(Path(source))}

    @functools.wraps(compute)
    def sub_step(step: Step, **arguments: Any) -> Record:
        made_from = inputs({"step": step, **arguments})
        place = _place(step, verb, made_from)
        found = read(place)
        if found:
            return found
        for value in arguments.values():
            for entry in value if isinstance(value, list) else [value]:
                if isinstance(entry, Artifact):
                    _need(entry)
        _explain_change(step, verb, made_from)
        partial = place.with_name(f".{place.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        began = time.time()
        said = compute(step, partial, **arguments)
        record = {
            "verb": verb,
            "step": asdict(step),
            "inputs": made_from,
            "artifacts": _artifacts(partial, place),
            "duration": time.time() - began,
            "finished": time.time(),
            "host": socket.gethostname(),
            **said,
        }
        (partial / "record.json").write_text(json.dumps(record, indent=1))
        shutil.rmtree(place, ignore_errors=True)
        partial.rename(place)
        shutil.rmtree(scratch(partial))
        return record

    sub_step.place = lambda step, **rest: _place(  # type: ignore[attr-defined]
        step, verb, inputs({"step": step, **rest})
    )
    signature = inspect.signature(compute)
    visible = [entry for name, entry in signature.parameters.items() if name != "folder"]
    sub_step.__signature__ = signature.replace(parameters=visible)  # type: ignore[attr-defined]
    return sub_step


def final_place(folder: Path) -> Path:
    """The name that the folder a sub-step is writing into will have."""
    return folder.with_name(folder.name.removeprefix(".").removesuffix(".partial"))


def scratch(folder: Path) -> Path:
    """A folder that outlives a kill: what a sub-step needs to go on where it was cut."""
    path = folder.with_name(f".{final_place(folder).name}.scratch")
    path.mkdir(parents=True, exist_ok=True)
    return path


def stage_key(recipe: BaseModel, *inputs: Artifact) -> str:
    """A key of a whole stage: its recipe and the digests of what it reads."""
    text = "/".join([recipe.model_dump_json(), *(entry.digest for entry in inputs)])
    return hashlib.blake2b(text.encode()).hexdigest()[:KEY_LETTERS]


def publish(made: Artifact, target: Path) -> None:
    """Copy an artifact to where the stage's out lies, whole or not at all. Raises PrunedError."""
    _need(made)
    source, partial = Path(made.path), target.with_name(f".{target.name}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove(partial)
    (shutil.copytree if source.is_dir() else shutil.copy)(source, partial)
    _remove(target)
    partial.rename(target)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def cache_key(context: Any, arguments: dict[str, Any]) -> str:
    """Prefect's cache key of a sub-step: its place in the ledger.

    A result that Prefect kept counts only while the ledger's own record is whole.
    """
    place: Path = context.task.fn.place(**arguments)
    key = str(place.relative_to(ROOT))
    if not read(place):
        (RESULTS / key).unlink(missing_ok=True)
    return key


RESULTS = ROOT / "prefect"
TASK_OPTIONS: dict[str, Any] = {
    "cache_key_fn": cache_key,
    "persist_result": True,
    "result_storage": RESULTS.absolute(),
    "result_serializer": "json",
}


def read(place: Path) -> Record | None:
    """The record at ``place``, if it is whole: what it made is there, with the same digests."""
    file = place / "record.json"
    if not file.exists():
        return None
    try:
        record: Record = json.loads(file.read_text())
    except ValueError:
        print(f"{file} is damaged: the sub-step is done again")
        return None
    if (place / RETIRED).exists():
        return record
    for made in record["artifacts"].values():
        path = Path(made["path"])
        if not path.exists() or digest(path) != made["digest"]:
            print(f"{path} is missing or damaged: {record['verb']} is done again")
            return None
    return record


def retire(step: Step, verb: str, keep: int, spare: Artifact | None = None) -> None:
    """Drop what ``verb`` made more than ``keep`` iterations ago; its records stay.

    The sub-step that made ``spare`` keeps everything.
    """
    for place in step.folder.glob(f"[0-9]*-{verb}-*"):
        if int(place.name[:4]) > step.iteration - keep or (place / RETIRED).exists():
            continue
        if spare and Path(spare.path).is_relative_to(place):
            continue
        (place / RETIRED).touch()
        for path in place.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in ("record.json", RETIRED):
                path.unlink()


def revive(folder: Path) -> None:
    """Forget what has been retired in a stage's ``folder``, so that it is made again."""
    for mark in list(folder.glob(f"[0-9]*/{RETIRED}")):
        shutil.rmtree(mark.parent)


def _place(step: Step, verb: str, made_from: Mapping[str, str]) -> Path:
    text = json.dumps(made_from, sort_keys=True)
    key = hashlib.blake2b(text.encode()).hexdigest()[:KEY_LETTERS]
    return step.folder / f"{step.iteration:04d}-{verb}-{key}"


def _artifacts(folder: Path, later: Path) -> dict[str, dict[str, str]]:
    return {
        path.stem: {"path": str(later / path.name), "digest": digest(path)}
        for path in sorted(folder.iterdir())
    }


def _identity(value: Any) -> str | None:
    """What an argument contributes to a key; None for one that can't change the outcome."""
    if isinstance(value, Artifact):
        return value.digest
    if isinstance(value, list):
        return json.dumps([_identity(entry) for entry in value])
    if isinstance(value, dict):
        return json.dumps({name: _identity(entry) for name, entry in value.items()}, sort_keys=True)
    if isinstance(value, Step):
        return json.dumps([value.iteration, value.seed])
    if isinstance(value, BaseModel):
        return json.dumps(value.model_dump(mode="json"), sort_keys=True)
    if value is None or isinstance(value, str | int | float | bool):
        return json.dumps(value)
    if callable(value):  # a tool or a progress bar
        return None
    raise TypeError(f"{value!r} can't be part of a key: pass an artifact, a section or a number")


def _explain_change(step: Step, verb: str, made_from: Mapping[str, str]) -> None:
    """Say once a stage why something that was done before is done anew."""
    for place in sorted(step.folder.glob(f"{step.iteration:04d}-{verb}-*")):
        try:
            older = json.loads((place / "record.json").read_text())["inputs"]
        except (OSError, ValueError, KeyError):
            continue
        changed = [name for name in made_from if older.get(name) != made_from[name]]
        if changed and (step.recipe, step.stage) not in _explained:
            _explained.add((step.recipe, step.stage))
            print(
                f"{step.stage}: {verb} of iteration {step.iteration} is done anew, since "
                f"{', '.join(changed)} changed"
            )


_explained: set[tuple[str, str]] = set()


# ---------------------------------------------------------------- source


@functools.cache
def source_digest(module: Path) -> str:
    """Digest of a module's source and of all project files that it imports, directly or not."""
    state = hashlib.blake2b(digest_size=16)
    for file in import_closure(module):
        state.update(str(file.relative_to(PROJECT)).encode() + b"\0" + file.read_bytes())
    return state.hexdigest()


def import_closure(module: Path) -> list[Path]:
    """The project files that ``module`` is made of: itself and what it imports, sorted."""
    found: set[Path] = set()
    waiting = [module.resolve()]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += [path for name in imports(file) if (path := _project_file(name))]
    return sorted(found)


def imports(file: Path) -> Iterable[str]:
    """Dotted names of the modules that a file may import; names from packages included."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _project_file(name: str) -> Path | None:
    if name.split(".")[0] not in ROOMS:
        return None
    path = PROJECT.joinpath(*name.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None

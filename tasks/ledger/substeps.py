"""The store of finished sub-steps: what each was made from, and what it made.

A sub-step (the rollout of iteration 3, say) writes into a folder of its own. When it has ended, its
record is added and the folder gets its name by one rename, so a name never holds half a result. The
name ends with the sub-step's key: a digest of everything that decides the outcome, namely the
arguments that hold values, the digests of the artifacts it reads, and the source of its module with
all project files that it imports. A run that was killed finds what it had finished; anything that
changed gets a new key.

A second place may be attached (tasks/store.py): what has ended is sent there, and what another
worker has finished is fetched instead of computed.

Prefect's cache asks ``cache_key`` and keeps the same record as its stored result, so that the UI
shows a sub-step that was found here as cached. The record in the folder is the truth.
"""

from __future__ import annotations

import functools
import inspect
import json
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from tasks.ledger.artifacts import RECORD, Artifact, Record, Step, digest, need, remove
from tasks.ledger.explain import changes, differing
from tasks.ledger.keys import identity, key_of, source_digest, source_digests

RETIRED = "retired"  # a file that names the artifacts that were dropped here on purpose
DELIVERED = "delivered"  # a file that names the second place where a sub-step lies too
MARKS = (RECORD, RETIRED, DELIVERED)


def recorded(compute: Callable[..., Mapping[str, Any]]) -> Callable[..., Record]:
    """Turn a function that fills a folder into a sub-step that is done once.

    ``compute(step, folder, ...)`` writes its artifacts into ``folder`` and returns what the record
    shall say beside them (metrics, seconds by part). The sub-step is called without ``folder`` and
    returns the record; a finished one is read back instead of computed. It raises PrunedError where
    an artifact that it must read is gone.
    """
    source = inspect.getsourcefile(compute)
    assert source
    verb, module = compute.__name__, Path(source)

    @functools.wraps(compute)
    def sub_step(step: Step, **arguments: Any) -> Record:
        made_from = _inputs(module, {"step": step, **arguments})
        place = _place(step, verb, made_from)
        if found := find(place):
            return found
        _need_all(arguments.values())
        made_of = {"inputs": made_from, "sources": source_digests(module)}
        tell(step, verb, made_of)
        partial = _empty(place.with_name(f".{place.name}.partial"))
        began = time.time()
        said = compute(step, partial, **arguments)
        about = {"verb": verb, "key": key_of(made_from), "step": asdict(step), **made_of}
        return _finish(partial, place, {**about, "duration": time.time() - began, **said})

    sub_step.place = lambda step, **rest: _place(  # type: ignore[attr-defined]
        step, verb, _inputs(module, {"step": step, **rest})
    )
    signature = inspect.signature(compute)
    visible = [entry for name, entry in signature.parameters.items() if name != "folder"]
    sub_step.__signature__ = signature.replace(parameters=visible)  # type: ignore[attr-defined]
    return sub_step


def _inputs(module: Path, arguments: Mapping[str, Any]) -> dict[str, str]:
    """What decides the outcome of a verb in ``module``: name -> identity."""
    values = {name: identity(value) for name, value in sorted(arguments.items())}
    known = {name: value for name, value in values.items() if value is not None}
    return {**known, "source": source_digest(module)}


def _need_all(values: Iterable[Any]) -> None:
    for value in values:
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, Artifact):
                need(entry)


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _finish(partial: Path, place: Path, record: Record) -> Record:
    """Write the record of what lies in ``partial``, give it its name and send it on."""
    record = {
        **record,
        "artifacts": _artifacts(partial, place),
        "finished": time.time(),
        "host": socket.gethostname(),
    }
    (partial / RECORD).write_text(json.dumps(record, indent=1))
    shutil.rmtree(place, ignore_errors=True)
    partial.rename(place)
    _used.add(place)
    for store in _stores:
        store.push(place)
    _drop_scratch(partial)
    return record


# ---------------------------------------------------------------- a second place


class Store(Protocol):
    """A second place for what the ledger holds, under the same names.

    None of these raises where it is away.
    """

    def push(self, place: Path) -> None:
        """Send a folder with a record there, unless it is marked as delivered."""

    def fetch(self, place: Path) -> Record | None:
        """Bring a whole folder from there to ``place``; None where there is none."""

    def drop(self, place: Path) -> None:
        """Remove what lies there."""

    def thin(self, place: Path, names: Iterable[str]) -> None:
        """Remove these files and folders there, and send the mark RETIRED."""

    def names(self, folder: Path) -> list[str]:
        """Names of what lies in a folder there."""


_stores: list[Store] = []  # at most one


@contextmanager
def attached(store: Store | None) -> Iterator[None]:
    """Sub-steps are shared through ``store`` until the end of the block."""
    _stores[:] = [store] if store else []
    try:
        yield
    finally:
        _stores.clear()


def find(place: Path) -> Record | None:
    """The whole record at ``place``, or the store's; what the store lacks is sent there."""
    found = read(place)
    for store in _stores:
        if found:
            store.push(place)
        else:
            found = store.fetch(place)
    if found:
        _taken.setdefault(place.parent, set()).add(place.name)
        _used.add(place)
    return found


def final_place(folder: Path) -> Path:
    """The name that the folder a sub-step is writing into will have."""
    return folder.with_name(folder.name.removeprefix(".").removesuffix(".partial"))


def scratch(folder: Path) -> Path:
    """A folder that outlives a kill: what a sub-step needs to go on where it was cut.

    It holds the ``seal``-ed folders that this worker or, through the store, another one has left.
    """
    path = _scratch(folder)
    path.mkdir(parents=True, exist_ok=True)
    for store in _stores:
        for name in store.names(path):
            if not (path / name).exists():
                store.fetch(path / name)
    return path


def _scratch(folder: Path) -> Path:
    return folder.with_name(f".{final_place(folder).name}.scratch")


def seal(folder: Path) -> None:
    """Say that a folder in a scratch is whole: ``read`` then knows what was in it, and the store
    gets it in place of those that are gone here."""
    partial = folder / f".{RECORD}.partial"
    partial.write_text(json.dumps({"verb": folder.name, "artifacts": _artifacts(folder, folder)}))
    partial.rename(folder / RECORD)
    for store in _stores:
        store.push(folder)
        for name in store.names(folder.parent):
            if not (folder.parent / name).exists():
                store.drop(folder.parent / name)


def _drop_scratch(folder: Path) -> None:
    if (path := _scratch(folder)).exists():
        for store in _stores:
            store.drop(path)
        shutil.rmtree(path)


def read(place: Path) -> Record | None:
    """The record at ``place``, if it is whole: what it made is there, with the same digests."""
    file = place / RECORD
    if not file.exists():
        return None
    try:
        record: Record = json.loads(file.read_text())
    except ValueError:
        print(f"{file} is damaged: the sub-step is done again")
        return None
    if fault := damaged(place, record):
        print(f"{fault} is missing or damaged: {record['verb']} is done again")
        return None
    return record


def damaged(place: Path, record: Record) -> Path | None:
    """The first artifact in ``place`` that isn't what its record says, but for those retired."""
    dropped = retired(place)
    for name, made in record["artifacts"].items():
        path = place / Path(made["path"]).name
        if name not in dropped and (not path.exists() or digest(path) != made["digest"]):
            return path
    return None


def retired(place: Path) -> set[str]:
    """Names of the artifacts that have been dropped from ``place``."""
    mark = place / RETIRED
    return set(mark.read_text().split("\n")) if mark.exists() else set()


def retire(
    step: Step,
    verb: str,
    last: int,
    every: int,
    weights: Collection[str],
    spare: Artifact | None = None,
) -> None:
    """Drop what ``verb`` made more than ``last`` iterations ago; its records stay.

    The artifacts ``weights`` of every ``every``-th iteration stay for ever, as do those of the
    sub-step that made ``spare``.
    """
    for place in step.folder.glob(f"[0-9]*-{verb}-*"):
        number = int(place.name.partition("-")[0])
        if number > step.iteration - last:
            continue
        spared = spare and Path(spare.path).is_relative_to(place)
        kept = weights if spared or (number + 1) % every == 0 else ()
        _drop(place, [p for p in place.iterdir() if p.name not in MARKS and p.stem not in kept])


def _drop(place: Path, paths: Sequence[Path]) -> None:
    """Remove artifacts, after a mark that says so; here, then in the store."""
    if not paths:
        return
    names = retired(place) | {path.stem for path in paths}
    partial = place / f".{RETIRED}.partial"
    partial.write_text("\n".join(sorted(names)))
    partial.rename(place / RETIRED)
    for path in paths:
        remove(path)
    for store in _stores:
        store.thin(place, [path.name for path in paths])


def revive(folder: Path) -> None:
    """Forget what has been retired of the run at hand in ``folder``, so that it is made again.

    What runs of other keys have left there stays.
    """
    for place in [place for place in _used if place.parent == folder]:
        if (place / RETIRED).exists():
            for store in _stores:
                store.drop(place)
            shutil.rmtree(place)


def _place(step: Step, verb: str, made_from: Mapping[str, str]) -> Path:
    return step.folder / f"{step.iteration:04d}-{verb}-{key_of(made_from)}"


def _artifacts(folder: Path, later: Path) -> dict[str, dict[str, str]]:
    found = [
        path for path in sorted(folder.iterdir()) if path.name not in MARKS and path.name[0] != "."
    ]
    names = [path.stem for path in found]
    unique = len(set(names)) == len(names)
    return {
        path.stem if unique else path.name: {"path": str(later / path.name), "digest": digest(path)}
        for path in found
    }


# ---------------------------------------------------------------- what has changed

_taken: dict[Path, set[str]] = {}  # folder of a stage -> sub-steps that were found there
_used: set[Path] = set()  # sub-steps that were found or done
_told: set[Path] = set()  # folders of the stages that have said what they begin with


def tell(step: Step, verb: str, made_of: Mapping[str, Mapping[str, str]]) -> None:
    """Say, once a stage, what a run finds of an older one when it begins with something new.

    That is how much it takes over, and, where the sub-step at hand was done before, what has
    changed since: values, inputs, source files. ``made_of``: its ``inputs`` and ``sources``.
    """
    if step.folder in _told:
        return
    _told.add(step.folder)
    taken = _taken.get(step.folder, set())
    older = _nearest(step, verb, taken, made_of["inputs"])
    at = f"{step.stage}: {verb} of iteration {step.iteration}"
    whole = {int(name.partition("-")[0]) for name in taken} - {step.iteration}
    reused = f"{len(taken)} sub-steps ({len(whole)} whole iterations) are taken over"
    if older:
        print(f"{at} is done anew; {reused}. What has changed since:")
        print("".join(f"  {line}\n" for line in changes(older, made_of)), end="")
    elif taken:
        print(f"{at} is next; {reused}")


def _nearest(
    step: Step, verb: str, taken: Collection[str], made_from: Mapping[str, str]
) -> Record | None:
    """The record of the same sub-step that differs in the fewest inputs, if there is one."""
    found = []
    for place in sorted(step.folder.glob(f"{step.iteration:04d}-{verb}-*")):
        with suppress(OSError, ValueError):
            if place.name not in taken:
                found.append(json.loads((place / RECORD).read_text()))
    return min(found, key=lambda r: len(differing(r["inputs"], made_from)), default=None)

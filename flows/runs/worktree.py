"""Worktrees in which runs happen, below ``.beamline/runs`` of the checkout they are started from.

Each has a record beside it, ``<name>.json``, which says what the run is for and which the process
that works there has locked. The lock ends with the process, however that ends: an unfinished
worktree that nobody holds is taken up by the next call for the same purpose.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from flows.host import files
from flows.runs import git
from tasks.ledger import artifacts

HOME = Path(".beamline/runs")
READY = Path(".beamline/ready")  # of a worktree: it has been set up as a whole


@contextmanager
def held(stem: str, purpose: Mapping[str, Any]) -> Iterator[Path]:
    """Where a run of this purpose works: a place that nobody else takes while the block lasts.

    It is an unfinished one, or one of a new name, ``<stem>-<date>-<id>``, where nothing lies yet.
    """
    HOME.mkdir(parents=True, exist_ok=True)
    record = _unfinished(dict(purpose)) or _new(stem, dict(purpose))
    with record:
        yield Path(record.name.removesuffix(".json")).absolute()


@contextmanager
def one_at_a_time(place: Path) -> Iterator[None]:
    """Wait until nobody else makes a worktree at ``place``, which is kept."""
    with files.locked(place.with_name(f"{place.name}.lock")):
        yield


def is_ready(place: Path) -> bool:
    """Whether a worktree is there as a whole."""
    return (place / READY).exists()


def set_ready(place: Path) -> None:
    """Say that a worktree is there as a whole."""
    (place / READY).parent.mkdir(exist_ok=True)
    (place / READY).touch()


def link_ledger(recipe: str, place: Path) -> None:
    """Have the finished sub-steps of this checkout's ledger in a worktree too, as links.

    No file of the ledger is changed in place, so neither side sees what the other one does.
    """
    for source in _finished(artifacts.ROOT / recipe):
        shutil.copytree(source, place / source, copy_function=os.link)


def collect_ledger(recipe: str, place: Path) -> None:
    """Keep the sub-steps that a worktree has finished in this checkout's ledger."""
    for source in _finished(place / artifacts.ROOT / recipe):
        target = source.relative_to(place)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)


def _finished(folder: Path) -> list[Path]:
    found = [record.parent for record in sorted(folder.rglob(f"[0-9]*/{artifacts.RECORD}"))]
    return [each for each in found if not any(p[0] == "." for p in each.relative_to(folder).parts)]


def finish(place: Path) -> None:
    """Remove a worktree that is held, and its record."""
    git.remove_worktree(place)
    release(place)


def release(place: Path) -> None:
    """Have the next call for this purpose begin anew; what lies at ``place`` stays."""
    place.with_name(f"{place.name}.json").unlink()


def _unfinished(purpose: Mapping[str, Any]) -> IO[str] | None:
    """The locked record of an unfinished run of this purpose, where nobody holds one."""
    for file in sorted(HOME.glob("*.json")):
        try:
            record = file.open("r+")
        except FileNotFoundError:  # it has just been finished
            continue
        if _lock(record) and _read(record) == purpose:
            return record
        record.close()
    return None


def _lock(record: IO[str]) -> bool:
    """Lock a record; False where somebody else has it, or has removed it meanwhile."""
    try:
        return files.lock(record) and os.path.samestat(
            os.fstat(record.fileno()), Path(record.name).stat()
        )
    except FileNotFoundError:
        return False


def _read(record: IO[str]) -> Any:
    try:
        return json.load(record)
    except ValueError:  # its writer was killed
        return None


def _new(stem: str, purpose: Mapping[str, Any]) -> IO[str]:
    """The locked record of a new run."""
    day = time.strftime("%Y%m%d", time.gmtime())
    record = (HOME / f"{stem}-{day}-{secrets.token_hex(3)}.json").open("x")
    files.lock(record)
    record.write(json.dumps(purpose))
    record.flush()
    return record

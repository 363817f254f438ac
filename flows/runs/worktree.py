"""Manage the worktrees of runs, below ``.beamline/runs`` of the checkout that starts them.

Each has a record beside it, ``<name>.json``, with the purpose of the run. The process that works
there holds a lock on the record, which the kernel releases when the process ends, however it ends.
The next call with the same purpose continues in an unfinished worktree that nobody holds.
"""

from __future__ import annotations

import fcntl
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
READY = Path(".beamline/ready")  # in a worktree: marks it as set up completely


@contextmanager
def held(stem: str, purpose: Mapping[str, Any]) -> Iterator[Path]:
    """Reserve a worktree's path for a run with this purpose while the block lasts.

    It is that of an unfinished worktree, or a new name ``<stem>-<date>-<id>`` where nothing is yet.
    """
    HOME.mkdir(parents=True, exist_ok=True)
    record = _unfinished(dict(purpose)) or _new(stem, dict(purpose))
    with record:
        yield Path(record.name.removesuffix(".json")).absolute()


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Hold the lock of ``path`` during the block: one process makes the worktree there.

    The file of the lock is removed with it.
    """
    lock = path.with_name(f"{path.name}.lock")
    while True:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_there(file):  # its holder, who was waited for, has removed it
                continue
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


def is_ready(worktree: Path) -> bool:
    """Return whether a worktree has been set up completely."""
    return (worktree / READY).exists()


def set_ready(worktree: Path) -> None:
    """Mark a worktree as set up completely."""
    (worktree / READY).parent.mkdir(exist_ok=True)
    (worktree / READY).touch()


def link_ledger(recipe: str, worktree: Path) -> None:
    """Hard-link the finished sub-steps of this checkout's ledger into a worktree.

    No file of the ledger is edited in place, so neither side changes the other.
    """
    for source in _finished(artifacts.ROOT / recipe):
        shutil.copytree(source, worktree / source, symlinks=True, copy_function=os.link)


def collect_ledger(recipe: str, worktree: Path) -> None:
    """Move the sub-steps that a worktree has finished to this checkout's ledger."""
    for source in _finished(worktree / artifacts.ROOT / recipe):
        target = source.relative_to(worktree)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)


def _finished(folder: Path) -> list[Path]:
    folders = [record.parent for record in sorted(folder.rglob(f"[0-9]*/{artifacts.RECORD}"))]
    return [
        each for each in folders if not any(p[0] == "." for p in each.relative_to(folder).parts)
    ]


def finish(worktree: Path) -> None:
    """Remove a worktree that is held, and its record."""
    git.remove_worktree(worktree)
    release(worktree)


def release(worktree: Path) -> None:
    """Remove the record of a worktree: the next call starts a new one; the worktree stays."""
    worktree.with_name(f"{worktree.name}.json").unlink()


def _unfinished(purpose: Mapping[str, Any]) -> IO[str] | None:
    """Lock and open the record of an unfinished run with this purpose; None where all are held."""
    for file in sorted(HOME.glob("*.json")):
        try:
            record = file.open("r+")
        except FileNotFoundError:  # finished just now
            continue
        if _lock(record) and _read(record) == purpose:
            return record
        record.close()
    return None


def _lock(record: IO[str]) -> bool:
    """Lock a record; False where another process holds it or has removed it meanwhile."""
    return files.lock(record) and _is_there(record)


def _is_there(file: IO[str]) -> bool:
    """Return whether the name of an open file is still its own."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), Path(file.name).stat())
    except FileNotFoundError:
        return False


def _read(record: IO[str]) -> Any:
    try:
        return json.load(record)
    except ValueError:  # its writer was killed
        return None


def _new(stem: str, purpose: Mapping[str, Any]) -> IO[str]:
    """Create, lock and open the record of a new run."""
    day = time.strftime("%Y%m%d", time.gmtime())
    record = (HOME / f"{stem}-{day}-{secrets.token_hex(3)}.json").open("x")
    files.lock(record)
    record.write(json.dumps(purpose))
    record.flush()
    return record

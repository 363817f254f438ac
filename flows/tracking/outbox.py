"""What a run had to say while the tracking store was away, kept in a folder until it is back.

A folder a run, a file a record, each written under another name first: a kill leaves whole records.
A file is removed when its record has been delivered. Whoever delivers holds the folder's lock,
which the kernel lets go of when its process ends.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from flows.host import files

RUNS = (".beamline", "runs")  # a run's worktree lies there, and is removed some day
ABOUT, LOCK = "run.json", "lock"


@dataclass(frozen=True)
class Record:
    """One call: its kind, what it says (as JSON holds it), and the bytes of a file."""

    kind: str
    said: Mapping[str, Any]
    content: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Spool:
    """A folder of records, held by this process."""

    folder: Path
    lock: IO[str]


def root() -> Path:
    """Where the folders are: in the checkout, also for a run in a worktree of it."""
    here = Path.cwd()
    return (here.parents[1] if here.parts[-3:-1] == RUNS else here / ".beamline") / "untracked"


def create(about: Mapping[str, Any], key: str) -> Spool:
    """A folder of its own for a run; ``about`` is what opens that run in the store."""
    name = f"{time.time_ns()}-{key}"  # in order of time: a pipeline stands before its stages
    with files.replaced(root() / name) as partial:
        partial.mkdir(parents=True)
        (partial / ABOUT).write_text(json.dumps(about))
        lock = (partial / LOCK).open("w")
        files.lock(lock)
    return Spool(root() / name, lock)


def add(spool: Spool, record: Record) -> None:
    """Append a record. Raises OSError where the disk takes it not."""
    waiting = entries(spool.folder)
    name = f"{int(waiting[-1].stem) + 1 if waiting else 0:06d}.record"
    head = json.dumps({"kind": record.kind, "said": record.said}).encode()
    with files.replaced(spool.folder / name) as partial:
        partial.write_bytes(head + b"\n" + record.content)


def entries(folder: Path) -> list[Path]:
    """The files of the records that wait, oldest first."""
    return sorted(folder.glob("*.record"))


def read(entry: Path) -> Record:
    """The record in a file."""
    head, _, content = entry.read_bytes().partition(b"\n")
    return Record(**json.loads(head), content=content)


def waiting() -> list[Path]:
    """The folders of runs, the oldest first, that no living process holds."""
    found = sorted(folder for folder in root().glob("[0-9]*") if (folder / ABOUT).exists())
    return [folder for folder in found if not _is_held(folder)]


def about(folder: Path) -> dict[str, Any]:
    """What opens the run in the store."""
    return dict(json.loads((folder / ABOUT).read_text()))


def close(spool: Spool) -> None:
    """Let go of a folder; it stays for whoever delivers it."""
    spool.lock.close()


def remove(spool: Spool) -> None:
    """Drop a folder of which all has been delivered."""
    shutil.rmtree(spool.folder, ignore_errors=True)
    spool.lock.close()


@contextmanager
def held(folder: Path) -> Iterator[Spool | None]:
    """A folder while this process holds it; None where another one does, or has just removed it."""
    with suppress(FileNotFoundError), (folder / LOCK).open("r") as lock:
        free = files.lock(lock) and (folder / ABOUT).exists()
        yield Spool(folder, lock) if free else None
        return
    yield None


def _is_held(folder: Path) -> bool:
    with held(folder) as spool:
        return spool is None

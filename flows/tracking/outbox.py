"""Messages that a server could not take, kept as files until it takes them.

A message is one file, written under another name first: a killed process leaves whole messages
only. The file is removed once the message has been sent. An MLflow run has an outbox of its own,
which the process of the run locks (the kernel releases the lock when that process ends). The ends
of Prefect's flow runs share one outbox.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from flows.host import files

WORKTREES = (".beamline", "runs")  # a run's worktree lies there, and is removed when the run ends
RUN_FILE, LOCK = "run.json", "lock"
FLOW_RUNS = "flow_runs"


@dataclass(frozen=True)
class OutboxMessage:
    """What one call sends: its kind, its fields (as JSON holds them), and the bytes of a file."""

    kind: str
    fields: Mapping[str, Any]
    content: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Outbox:
    """A folder of unsent messages, which several processes may add to."""

    folder: Path

    def add(self, message: OutboxMessage) -> None:
        """Append a message. Raises OSError where the disk does not take it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        unsent = self.files()
        number = int(unsent[-1].stem.partition("-")[0]) + 1 if unsent else 0
        name = f"{number:06d}-{uuid.uuid4().hex}.message"
        head = json.dumps({"kind": message.kind, "fields": message.fields}).encode()
        with files.replaced(self.folder / name) as partial:
            partial.write_bytes(head + b"\n" + message.content)

    def files(self) -> list[Path]:
        """Return the files of the unsent messages, oldest first."""
        return sorted(self.folder.glob("*.message"))


@dataclass(frozen=True)
class RunOutbox(Outbox):
    """The outbox of one MLflow run, locked by this process."""

    lock: IO[str] = field(repr=False)

    def run(self) -> dict[str, Any]:
        """Return what opens the run in the store, as given to ``create``."""
        return read_run(self.folder)

    def close(self) -> None:
        """Release the lock; the folder stays for the process that sends the messages."""
        self.lock.close()

    def remove(self) -> None:
        """Remove the folder, all of whose messages have been sent."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.lock.close()


def root() -> Path:
    """Return the folder of all outboxes; that of the checkout for a run in a worktree of it."""
    here = Path.cwd()
    checkout = here.parents[1] if here.parts[-3:-1] == WORKTREES else here / ".beamline"
    return checkout / "unsent"


def flow_runs() -> Outbox:
    """Return the outbox of the ends of Prefect's flow runs."""
    return Outbox(root() / FLOW_RUNS)


def create(run: Mapping[str, Any], key: str) -> RunOutbox:
    """Make the outbox of a run; ``run`` is what opens it in the store."""
    name = f"{time.time_ns()}-{key}"  # sorts by time: a pipeline before its stages
    with files.replaced(root() / name) as partial:
        partial.mkdir(parents=True)
        (partial / RUN_FILE).write_text(json.dumps(run))
        lock = (partial / LOCK).open("w")
        files.lock(lock)
    return RunOutbox(root() / name, lock)


def read(file: Path) -> OutboxMessage:
    """Return the message in a file."""
    head, _, content = file.read_bytes().partition(b"\n")
    return OutboxMessage(**json.loads(head), content=content)


def read_run(folder: Path) -> dict[str, Any]:
    """Return what opens the run of an outbox in the store."""
    return dict(json.loads((folder / RUN_FILE).read_text()))


def unsent_runs() -> list[Path]:
    """Return the outboxes of runs that no living process holds, oldest first."""
    folders = sorted(folder for folder in root().glob("[0-9]*") if (folder / RUN_FILE).exists())
    return [folder for folder in folders if not _is_held(folder)]


@contextmanager
def hold(folder: Path) -> Iterator[RunOutbox | None]:
    """Lock an outbox for the block; None where another process holds it or has just removed it."""
    with suppress(FileNotFoundError), (folder / LOCK).open("r") as lock:
        whole = files.lock(lock) and (folder / RUN_FILE).exists()
        yield RunOutbox(folder, lock) if whole else None
        return
    yield None


def _is_held(folder: Path) -> bool:
    with hold(folder) as outbox:
        return outbox is None

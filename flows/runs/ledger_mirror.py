"""Mirror the ledger in a place that other workers share: a folder, SSH, S3, any remote of DVC.

The environment variable BEAMLINE_STORE is its address: a folder, or what ``dvc remote add`` takes
(``remote://<name>/<path>`` for a remote's credentials). Without it, the folder ``ledger`` of DVC's
default remote is used; without a remote there is no mirror. A folder has the same name there as in
the ledger, and is a record and an archive of its artifacts (flows/runs/mirror_files.py). A sub-step
counts once its record is there, which is written last, and while its artifacts have the sizes and
digests in the record.

What is there is not believed. The record is fetched first and checked (tasks/ledger/records.py);
then only files of the artifacts that it names are unpacked, by names that stay inside the folder.
Links are refused, there and here. With a key in BEAMLINE_STORE_KEY, a record counts only with a
signature by that key. Whatever is malformed is computed again.

Folders are sent by a thread, while the run computes (flows/runs/uploads.py); the end of the run
waits for it. An unreachable mirror never stops a run: it is logged once, and what the mirror lacks
is sent as soon as it is reachable, by this run or by the next call. That call also sends what a
killed run had not sent yet: it lacks the mark DELIVERED.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from flows.host.addresses import address_without_password
from flows.host.plain_reasons import plain_reason
from flows.runs import cache, mirror_files
from flows.runs.mirror_files import Filesystem, RefusedMirrorError, name_of
from flows.runs.uploads import UploadQueue
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Record
from tasks.ledger.records import DELIVERED, SUB_STEP, read
from tasks.ledger.substeps import Ledger

VARIABLE = "BEAMLINE_STORE"  # environment variable: a folder or an address
SECRET = "BEAMLINE_STORE_KEY"  # environment variable: what records are signed with, a text
SHORTEST = 16  # characters of that text
PAUSE = 30.0  # seconds before an unreachable mirror is tried again
PROGRESS = 10.0  # seconds between two lines of a run that waits for the mirror at its end
Result = TypeVar("Result")


class RemoteMirror:
    """The mirror at ``address``; ``connect`` returns its filesystem and the folder in it.

    ``key`` signs what is sent and checks what is fetched; b"" for no signatures.
    """

    def __init__(
        self, address: str, connect: Callable[[], tuple[Filesystem, str]], key: bytes = b""
    ) -> None:
        self.address = address_without_password(address)  # for logs, and for the mark DELIVERED
        self.connect = connect
        self.key = key
        self.base = Path.cwd()  # of the ledger, for the thread that sends
        self.own = threading.local()  # each thread's connection: filesystems cache without locks
        self.unreachable_until = 0.0  # on the clock of time.monotonic
        self.logged = False  # that it is unreachable
        self.uploads = UploadQueue(self._deliver)

    def push(self, folder: Path) -> None:
        """Have a folder sent as it is now, unless it is marked as delivered.

        One that is no longer here is removed there.
        """
        if not self.has(folder):
            self.uploads.add(folder)

    def has(self, folder: Path) -> bool:
        """Return whether a folder is marked as delivered to this mirror, with this key."""
        mark = folder / DELIVERED
        return mark.exists() and mark.read_bytes() == self._delivered()

    def withdraw(self, folder: Path) -> None:
        """Call this before changing a folder: it is not sent until it is pushed again."""
        self.uploads.withdraw(folder)
        (folder / DELIVERED).unlink(missing_ok=True)

    def _delivered(self) -> bytes:
        """Return the content of DELIVERED: other keys and addresses have others."""
        return self.address.encode() + (
            b"\n" + mirror_files.sign(self.key, "") if self.key else b""
        )

    def _deliver(self, folder: Path) -> bool:
        """Send a folder; return False where the mirror is unreachable."""
        here, name = self.base / folder, name_of(folder)

        def work(fs: Filesystem, root: str) -> bool:
            mirror_files.send(fs, root, name, here, self.key)
            return True

        try:
            sent = self._attempt(work, False)
            # sealed ones are cleared
            if sent and SUB_STEP.fullmatch(folder.name) and here.exists():
                (here / DELIVERED).write_bytes(self._delivered())
            return sent
        except (RefusedMirrorError, OSError) as error:
            print(f"{folder} is not sent: {error}")
            return True

    def fetch(self, folder: Path) -> Record | None:
        """Download a whole ``folder`` and return its record; None where there is none.

        None, with a log line, for one that is malformed, incomplete, damaged or not signed.
        """
        partial = folder.with_name(f".{folder.name}.fetched")
        artifacts.remove(partial)
        partial.mkdir(parents=True)
        record = None
        try:
            record = self._attempt(
                lambda fs, root: mirror_files.receive(fs, root, folder, partial, self.key), None
            )
        except RefusedMirrorError as error:
            where = f"{self.address}/{name_of(folder)}"
            print(f"{where} is damaged ({error}): {folder.name} is computed again")
        if record is None:
            shutil.rmtree(partial)
            return None
        (partial / DELIVERED).write_bytes(self._delivered())
        self.withdraw(folder)
        artifacts.remove(folder)
        partial.rename(folder)
        return record

    def drop(self, folder: Path) -> None:
        """Remove a folder from the mirror."""
        self.withdraw(folder)
        self._unless_refused(lambda fs, root: mirror_files.remove(fs, root, name_of(folder)), None)

    def names(self, folder: Path) -> list[str]:
        """List the plain names in a folder of the mirror, sorted."""
        return self._unless_refused(
            lambda fs, root: mirror_files.names_in(fs, root, name_of(folder)), []
        )

    def flush(self) -> None:
        """Wait until all is sent; what could not be is tried once more."""
        self.unreachable_until = 0.0
        self.uploads.retry()
        while left := self.uploads.wait(PROGRESS):
            print(f"{left} sub-steps are still to be sent to the mirror {self.address}", flush=True)
        if self.uploads.unsent:
            print(
                f"the mirror {self.address} lacks {len(self.uploads.unsent)} sub-steps of this "
                "run: the next call sends them"
            )

    def _unless_refused(
        self, work: Callable[[Filesystem, str], Result], otherwise: Result
    ) -> Result:
        try:
            return self._attempt(work, otherwise)
        except RefusedMirrorError as error:
            print(f"the mirror is left as it is: {error}")
            return otherwise

    def _attempt(self, work: Callable[[Filesystem, str], Result], otherwise: Result) -> Result:
        """Call ``work`` with filesystem and folder; return ``otherwise`` where unreachable.

        Raises RefusedError as ``work``.
        """
        if time.monotonic() < self.unreachable_until:
            return otherwise
        try:
            if not hasattr(self.own, "connection"):
                self.own.connection = self.connect()
            return work(*self.own.connection)
        except RefusedMirrorError:
            raise
        except Exception as error:  # filesystems raise all kinds
            if hasattr(self.own, "connection"):  # fsspec would return the dead one again
                type(self.own.connection[0]).clear_instance_cache()
                del self.own.connection
            self.unreachable_until = time.monotonic() + PAUSE
            if not self.logged:
                why = plain_reason(error)
                print(f"the mirror {self.address} is unreachable ({why}): the run continues")
                self.logged = True
            return otherwise


def of_checkout() -> RemoteMirror | None:
    """Return the mirror of this checkout, or None.

    Raises ValueError for an address that can never be reached, and for a key that is too short.
    """
    address = os.environ[VARIABLE] if VARIABLE in os.environ else cache.default_store()
    return RemoteMirror(address, cache.filesystem(address), _key()) if address else None


def undelivered(recipe: str, mirror: RemoteMirror) -> list[Path]:
    """List the finished sub-steps of a recipe, or of "*", that are not marked as delivered."""
    records = sorted(artifacts.ROOT.glob(f"{recipe}/**/[0-9]*/{artifacts.RECORD}"))
    folders = [record.parent for record in records]
    finished = [
        folder for folder in folders if not any(part[0] == "." for part in folder.parts[2:])
    ]
    return [folder for folder in finished if not mirror.has(folder)]


def forget_lost(recipe: str, mirror: RemoteMirror) -> None:
    """Remove the mark of sub-steps that the mirror was sent and has no more; it is asked."""
    marks = sorted(artifacts.ROOT.glob(f"{recipe}/**/[0-9]*/{DELIVERED}"))
    for stage in dict.fromkeys(mark.parent.parent for mark in marks):
        names = mirror.names(stage)
        if time.monotonic() < mirror.unreachable_until:
            return
        for mark in marks:
            if mark.parent.parent == stage and mark.parent.name not in names:
                mark.unlink(missing_ok=True)


def send_missing(recipe: str) -> None:
    """Send the finished sub-steps of a recipe, or of "*", that the mirror is not known to have.

    That is all of them for a mirror that was set up after the runs.
    """
    mirror = of_checkout()
    folders = undelivered(recipe, mirror) if mirror else []
    if not mirror or not folders:
        return
    print(f"sending {len(folders)} sub-steps to the mirror {mirror.address}", flush=True)
    for folder in folders:
        if read(folder):
            mirror.push(folder)
    mirror.flush()


@contextmanager
def opened() -> Iterator[Ledger]:
    """Yield a run's ledger, which shares its sub-steps through the mirror of this checkout, if any.

    Raises ValueError as ``of_checkout``.
    """
    mirror = of_checkout()
    if not mirror:
        yield Ledger()
        return
    try:
        yield Ledger(mirror)
    except Exception:
        mirror.flush()
        raise
    mirror.flush()  # an interrupted run does not wait: the next call sends the rest


def _key() -> bytes:
    """Return the key of the environment; b"" without one."""
    text = os.environ.get(SECRET, "")
    if text and len(text) < SHORTEST:
        raise ValueError(
            f"{SECRET} has {len(text)} characters, and needs {SHORTEST} or more: "
            "`openssl rand -hex 32` prints a good one"
        )
    return text.encode()

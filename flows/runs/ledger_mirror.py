"""Mirror the ledger in a place that other workers share: a folder, SSH, S3, any remote of DVC.

The environment variable BEAMLINE_STORE is its address: a folder, or what ``dvc remote add`` takes
(``remote://<name>/<path>`` for a remote's credentials). Without it, the folder ``ledger`` of DVC's
default remote is used; without a remote there is no mirror. Everything has the same name there as
in the ledger. A sub-step counts once its record is there, which is written last, and while its
files have the digests in the record.

An unreachable mirror never stops a run: it is logged once, and what the mirror lacks is queued and
sent as soon as it is reachable, by this run or by the next call.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from flows.host.addresses import without_password
from flows.runs import cache
from tasks.ledger import artifacts, substeps
from tasks.ledger.artifacts import RECORD, Record
from tasks.ledger.substeps import DELIVERED, RETIRED, Ledger

VARIABLE = "BEAMLINE_STORE"  # environment variable: a folder or an address
PAUSE = 30.0  # seconds before an unreachable mirror is tried again
Result = TypeVar("Result")
Filesystem = Any  # of fsspec


class Mirror:
    """The mirror at ``address``; ``connect`` returns its filesystem and the folder in it."""

    def __init__(self, address: str, connect: Callable[[], tuple[Filesystem, str]]) -> None:
        self.address = without_password(address)  # for logs, and for the mark DELIVERED
        self.connect = connect
        self.connection: tuple[Filesystem, str] | None = None
        self.unreachable_until = 0.0  # on the clock of time.monotonic
        self.logged = False  # that it is unreachable
        self.queued: set[Path] = set()  # not sent yet

    def push(self, place: Path) -> None:
        """Send a folder with a record, unless it is marked as delivered; the record comes last."""
        mark = place / DELIVERED
        if mark.exists() and mark.read_text() == self.address:
            return
        self.queued.add(place)
        for each in [place, *sorted(self.queued - {place})]:
            self._deliver(each)

    def _deliver(self, place: Path) -> None:
        if not (place / RECORD).exists():  # removed since: retired, revived or computed again
            self.queued.discard(place)
            return
        if self._attempt(lambda fs, root: _send(fs, place, f"{root}/{_name(place)}"), False):
            (place / DELIVERED).write_text(self.address)
            self.queued.discard(place)

    def fetch(self, place: Path) -> Record | None:
        """Download a whole folder to ``place`` and return its record; None where there is none."""
        partial = place.with_name(f".{place.name}.fetched")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        there = _name(place)
        self._attempt(lambda fs, root: _receive(fs, f"{root}/{there}", partial), None)
        record = self._whole(partial, f"{self.address}/{there}")
        if record is None:
            shutil.rmtree(partial)
            return None
        (partial / DELIVERED).write_text(self.address)
        shutil.rmtree(place, ignore_errors=True)
        partial.rename(place)
        return record

    def _whole(self, partial: Path, there: str) -> Record | None:
        """Return a download's record; None, with a log line, where it is incomplete or damaged."""
        if not (partial / RECORD).exists():
            return None
        with suppress(ValueError):
            record: Record = json.loads((partial / RECORD).read_text())
            if not substeps.damaged(partial, record):
                return record
        print(f"{there} is damaged: {partial.name.strip('.')} is computed again")
        return None

    def drop(self, place: Path) -> None:
        """Remove a folder from the mirror."""
        self.queued = {each for each in self.queued if not each.is_relative_to(place)}
        self._attempt(lambda fs, root: _remove(fs, f"{root}/{_name(place)}"), None)

    def thin(self, place: Path, names: Iterable[str]) -> None:
        """Remove these files and folders from the mirror, after sending the mark RETIRED.

        Where the mirror is unreachable, the whole folder is sent again later.
        """

        def work(fs: Filesystem, root: str) -> bool:
            there = f"{root}/{_name(place)}"
            fs.put_file(str(place / RETIRED), f"{there}/{RETIRED}")
            for name in names:
                _remove(fs, f"{there}/{name}")
            return True

        if (place / DELIVERED).exists() and not self._attempt(work, False):
            (place / DELIVERED).unlink()

    def names(self, folder: Path) -> list[str]:
        """List the names in a folder of the mirror, sorted."""

        def work(fs: Filesystem, root: str) -> list[str]:
            fs.invalidate_cache()
            there = f"{root}/{_name(folder)}"
            found = fs.ls(there, detail=False) if fs.exists(there) else []
            return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

        return self._attempt(work, [])

    def flush(self) -> None:
        """Send what is queued, in one last attempt."""
        self.unreachable_until = 0.0
        for place in sorted(self.queued):
            self._deliver(place)
        if self.queued:
            print(
                f"the mirror {self.address} lacks {len(self.queued)} sub-steps of this run: the "
                "next call sends them"
            )

    def _attempt(self, work: Callable[[Filesystem, str], Result], otherwise: Result) -> Result:
        """Call ``work`` with filesystem and folder; return ``otherwise`` where unreachable."""
        if time.monotonic() < self.unreachable_until:
            return otherwise
        try:
            self.connection = self.connection or self.connect()
            return work(*self.connection)
        except Exception as error:  # filesystems raise all kinds
            if self.connection:  # fsspec would return the dead connection again
                type(self.connection[0]).clear_instance_cache()
            self.connection, self.unreachable_until = None, time.monotonic() + PAUSE
            if not self.logged:
                reason = without_password(f"{type(error).__name__}: {error}").partition("\n")[0]
                print(f"the mirror {self.address} is unreachable ({reason}): the run continues")
                self.logged = True
            return otherwise


@contextmanager
def opened() -> Iterator[Ledger]:
    """Yield a run's ledger, which shares its sub-steps through the mirror of this checkout, if any.

    Raises ValueError for an address that can never be reached.
    """
    address = os.environ[VARIABLE] if VARIABLE in os.environ else cache.default_store()
    if not address:
        yield Ledger()
        return
    mirror = Mirror(address, cache.filesystem(address))
    try:
        yield Ledger(mirror)
    finally:
        mirror.flush()


def _name(place: Path) -> str:
    return place.relative_to(artifacts.ROOT).as_posix()


def _send(fs: Filesystem, place: Path, there: str) -> bool:
    """Replace the folder ``there`` by the folder ``place``; the record is sent last."""
    files = [path for path in sorted(place.rglob("*")) if path.is_file()]
    names = [path.relative_to(place).as_posix() for path in files]
    ordered = [name for name in names if name not in (RECORD, DELIVERED)] + [RECORD]
    _remove(fs, there)
    for folder in sorted({f"{there}/{name}".rpartition("/")[0] for name in ordered}):
        fs.makedirs(folder, exist_ok=True)
    for name in ordered:
        fs.put_file(str(place / name), f"{there}/{name}")
    return True


def _receive(fs: Filesystem, there: str, folder: Path) -> None:
    """Copy the folder ``there`` into ``folder``, if it has a record."""
    fs.invalidate_cache()
    if not fs.exists(f"{there}/{RECORD}"):
        return
    for path in fs.find(there):
        target = folder / path[len(there) :].lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        fs.get_file(path, str(target))


def _remove(fs: Filesystem, there: str) -> None:
    """Remove a file or a folder, its record first."""
    fs.invalidate_cache()
    if fs.exists(f"{there}/{RECORD}"):
        fs.rm_file(f"{there}/{RECORD}")
    if fs.exists(there):
        fs.rm(there, recursive=True)

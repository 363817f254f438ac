"""A second place for the ledger, which other workers see: a shared folder, SSH, S3, what DVC knows.

The environment variable BEAMLINE_STORE says where: a folder or an address as ``dvc remote add``
takes it (``remote://<name>/<path>`` for the credentials of a remote); else it is the folder
``ledger`` of DVC's default remote; without either there is none. Everything lies there under the
name that it has in the ledger. A sub-step counts once its record is there, which is written last,
and while its files have the digests that the record names.

A store that is away never stops a run: it is said once, the run goes on, and what is missing there
is delivered as soon as the store is back, by this run or by the next call of it.
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

from flows.runs import cache
from tasks.ledger import artifacts, substeps
from tasks.ledger.artifacts import RECORD, Record
from tasks.ledger.substeps import DELIVERED, RETIRED, Ledger

VARIABLE = "BEAMLINE_STORE"  # environment variable: a folder or an address
PAUSE = 30.0  # seconds before a store that was away is asked again
Result = TypeVar("Result")
Filesystem = Any  # of fsspec


class Store:
    """The second place at ``address``; ``connect`` gives its filesystem and the folder in it."""

    def __init__(self, address: str, connect: Callable[[], tuple[Filesystem, str]]) -> None:
        self.address = address
        self.connect = connect
        self.connection: tuple[Filesystem, str] | None = None
        self.away_until = 0.0  # on the clock of time.monotonic
        self.told = False  # that it is away
        self.waiting: set[Path] = set()  # what could not be delivered yet

    def push(self, place: Path) -> None:
        """Send a folder with a record, unless it is marked as delivered; its record comes last."""
        mark = place / DELIVERED
        if mark.exists() and mark.read_text() == self.address:
            return
        self.waiting.add(place)
        for each in [place, *sorted(self.waiting - {place})]:
            self._deliver(each)

    def _deliver(self, place: Path) -> None:
        if not (place / RECORD).exists():  # gone since: retired, revived or done anew
            self.waiting.discard(place)
            return
        if self._attempt(lambda fs, root: _send(fs, place, f"{root}/{_name(place)}"), False):
            (place / DELIVERED).write_text(self.address)
            self.waiting.discard(place)

    def fetch(self, place: Path) -> Record | None:
        """Bring a whole folder from there to ``place``; None where there is none."""
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
        """The record of what was fetched; None, said aloud, where it is not whole."""
        if not (partial / RECORD).exists():
            return None
        with suppress(ValueError):
            record: Record = json.loads((partial / RECORD).read_text())
            if not substeps.damaged(partial, record):
                return record
        print(f"{there} is damaged: {partial.name.strip('.')} is done again")
        return None

    def drop(self, place: Path) -> None:
        """Remove what lies there."""
        self.waiting = {each for each in self.waiting if not each.is_relative_to(place)}
        self._attempt(lambda fs, root: _remove(fs, f"{root}/{_name(place)}"), None)

    def thin(self, place: Path, names: Iterable[str]) -> None:
        """Remove these files and folders there, and send the mark RETIRED first.

        Where the store is away, all that is left is sent anew later.
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
        """Names of what lies in a folder there, sorted."""

        def work(fs: Filesystem, root: str) -> list[str]:
            fs.invalidate_cache()
            there = f"{root}/{_name(folder)}"
            found = fs.ls(there, detail=False) if fs.exists(there) else []
            return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

        return self._attempt(work, [])

    def flush(self) -> None:
        """Deliver what is waiting, in one last attempt."""
        self.away_until = 0.0
        for place in sorted(self.waiting):
            self._deliver(place)
        if self.waiting:
            print(
                f"the store {self.address} lacks {len(self.waiting)} sub-steps of this run: the "
                "next call delivers them"
            )

    def _attempt(self, work: Callable[[Filesystem, str], Result], otherwise: Result) -> Result:
        """What ``work`` returns, given the filesystem and the folder; ``otherwise`` where the store
        is away."""
        if time.monotonic() < self.away_until:
            return otherwise
        try:
            self.connection = self.connection or self.connect()
            return work(*self.connection)
        except Exception as error:  # of whatever kind its filesystem raises
            if self.connection:  # fsspec would give the dead connection again
                type(self.connection[0]).clear_instance_cache()
            self.connection, self.away_until = None, time.monotonic() + PAUSE
            if not self.told:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                print(f"the store {self.address} is away ({reason}): the run goes on without it")
                self.told = True
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
    mirror = Store(address, cache.filesystem(address))
    try:
        yield Ledger(mirror)
    finally:
        mirror.flush()


def _name(place: Path) -> str:
    return place.relative_to(artifacts.ROOT).as_posix()


def _send(fs: Filesystem, place: Path, there: str) -> bool:
    """Replace what lies ``there`` by the folder ``place``; its record comes last."""
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
    """Copy what lies ``there`` into ``folder``, if it has a record."""
    fs.invalidate_cache()
    if not fs.exists(f"{there}/{RECORD}"):
        return
    for path in fs.find(there):
        target = folder / path[len(there) :].lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        fs.get_file(path, str(target))


def _remove(fs: Filesystem, there: str) -> None:
    """Remove a file or a folder, of which the record goes first."""
    fs.invalidate_cache()
    if fs.exists(f"{there}/{RECORD}"):
        fs.rm_file(f"{there}/{RECORD}")
    if fs.exists(there):
        fs.rm(there, recursive=True)

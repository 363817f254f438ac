"""Import a user's file in this process, after a process that is guarded has imported it.

A recipe's check needs the objects of the file: its settings, signatures and type hints. An import
that hangs or ends its process does so in the guarded process, and becomes an error by name. In this
process, what an import leaves behind is undone or ends with the process.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from tasks.extensions import descendants, process_state, user_code_worker
from tasks.extensions.pool import START_SECONDS, open_pool
from tasks.extensions.user_code_worker import DIED, TIMEOUT

IMPORTER = f"tasks/extensions/{Path(__file__).name}:import_only"


class UnfinishedImportError(ValueError):
    """An import takes too long or ends its process."""


def import_file(file: Path, contents: str, seconds: float = START_SECONDS) -> Any:
    """Return the module of a user's file, whose path starts at a folder of imports.

    ``contents``: a digest of what it may import. Raises UnfinishedImportError where an import takes
    longer than ``seconds`` or ends its process; and what the import raises.
    """
    name = ".".join(file.with_suffix("").parts)
    if name in sys.modules:
        return sys.modules[name]
    _try_import(file, name, contents, seconds)
    with contained(), user_code_worker.ending_forks():
        return importlib.import_module(name)


@cache
def _try_import(file: Path, name: str, contents: str, seconds: float) -> None:
    """Import a module in a guarded process, once for the same contents."""
    with open_pool(IMPORTER, {}, 1, seconds) as pool:
        (reply,) = pool.ask([(0, "", [name])])
    if reply.failure == TIMEOUT:
        raise UnfinishedImportError(
            f"{file}: its import takes longer than {seconds:g} seconds: do what takes long in the "
            "first call"
        )
    if reply.failure == DIED:
        raise UnfinishedImportError(
            f"{file}: {reply.message} when the file was imported: correct the file"
        )


def import_only(name: str) -> None:
    """Import a module, in a process of a pool."""
    importlib.import_module(name)


@contextmanager
def contained() -> Iterator[None]:
    """Undo what an import changes in this process, and have what it starts end with it."""
    before, daemon = set(descendants.descendants()), threading.current_thread().daemon
    with process_state.kept():
        os.environ.update(descendants.owned({}))  # the doctor finds what outlives a killed command
        # Threads inherit it. One that is no daemon would keep the command from ending.
        threading.current_thread()._daemonic = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            threading.current_thread()._daemonic = daemon  # type: ignore[attr-defined]
            _end_at_exit(sorted(set(descendants.descendants()) - before))


def _end_at_exit(processes: Sequence[int]) -> None:
    """Have processes killed when this one ends."""
    opened = []
    for process in processes:
        with suppress(OSError):  # it has ended
            opened.append(os.pidfd_open(process))  # a number could be another process's by then
    if opened:
        atexit.register(partial(_end, os.getpid(), opened))


def _end(ours: int, opened: Sequence[int]) -> None:
    if os.getpid() != ours:  # a fork of the process that has started them
        return
    for process in opened:
        with suppress(OSError):
            signal.pidfd_send_signal(process, signal.SIGKILL)

"""Lock files among the processes of a machine; write files and folders whole or not at all.

The locks are the kernel's (flock): they end with the process that holds them, also by SIGKILL, so
none is ever stale. The library filelock creates the file that it locks and opens it for writing;
here, locks are also looked at without being made, and those of GPUs may belong to another user.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def lock(file: IO[Any]) -> bool:
    """Lock an open file until it is closed; return False where another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of ``path`` during the block, after waiting for it. The file is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_locked(file: IO[Any]) -> bool:
    """Return whether another process holds the lock of an open file, without taking it."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look do not collide
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside ``path`` to write a file or folder; rename it at the end.

    A reader sees what was there before or the whole of the new, also after a kill. A block that
    raises leaves ``path`` as it was. A folder replaces no folder that holds anything.
    """
    partial = path.with_name(f".{path.name}.partial")
    remove(partial)  # of a killed writer
    try:
        yield partial
    except BaseException:
        remove(partial)
        raise
    partial.replace(path)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

"""Keep new, empty SQLite databases of libraries in the user's cache folder.

Prefect and MLflow make a new database by all migrations that there ever were, which takes longer
than the rest of a program's start. The migrations of one version always give the same.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path

from tasks.ledger.parsed import cache_folder


def take(library: str, target: Path) -> bool:
    """Copy the empty database of a library to ``target``; return False where none is kept.

    One that is already at ``target`` stays.
    """
    file = _file(library)
    if not file.is_file():
        return False
    try:
        _copy(file, target)
    except sqlite3.Error:  # damaged: the next one is kept in its place
        with suppress(OSError):
            file.unlink()
        return False
    return True


def keep(library: str, database: Path) -> None:
    """Keep an empty database of a library; a folder that cannot be written only costs time."""
    file = _file(library)
    with suppress(OSError, sqlite3.Error):
        file.parent.mkdir(parents=True, exist_ok=True)
        _copy(database, file)


def _copy(source: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        copy = Path(folder) / "copy.db"
        with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(copy)) as new:
            old.backup(new)
        with suppress(FileExistsError):
            os.link(copy, target)


def _file(library: str) -> Path:
    return cache_folder() / f"{library}-{version(library)}-empty.db"

"""Copies of Fast Downward's library, each of which holds one problem at a time.

``fast_downward.load_lib`` copies the library's file for each problem, because a file is loaded only
once in a process. Its 34 MB are symbols for a debugger, for the most part: copying them was half of
the time of opening a game. Here a copy has only what is loaded, and is used again.
"""

from __future__ import annotations

import functools
import struct
import tempfile
from pathlib import Path
from typing import Any

LOADED = 1  # PT_LOAD, the type of an ELF segment that is put into memory
SEGMENTS_AT, SEGMENTS_SIZE = 32, 54  # where a 64 bit ELF header names the table of segments


def taken() -> Any:
    """Return a library without a problem, for one game."""
    free = _free()
    return free.pop() if free else _new()


def give_back(library: Any) -> None:
    """Empty the library of a game that nobody holds, for the next game."""
    library.cleanup()
    _free().append(library)


@functools.lru_cache(maxsize=1)
def _free() -> list[Any]:
    """Return the libraries that this process has loaded and that hold no problem."""
    return []


def _new() -> Any:
    import fast_downward
    from fast_downward import interface

    interface.DOWNWARD_LIB_PATH = _small_file(interface.DOWNWARD_LIB_PATH).name
    library = fast_downward.load_lib()
    library.get_state_id.restype = library.set_state_id.restype = int
    return library


@functools.lru_cache(maxsize=2)
def _small_file(path: str) -> Any:
    """Return a temporary file of this process with what is loaded of a library.

    A file of another format than 64 bit ELF is copied whole.
    """
    whole = Path(path).read_bytes()
    file = tempfile.NamedTemporaryFile(suffix=".so")  # noqa: SIM115  deleted with the process
    file.write(whole[: loaded_bytes(whole)])
    file.flush()
    return file


def loaded_bytes(library: bytes) -> int:
    """Return where the last segment ends that a loader puts into memory; all bytes if unknown."""
    if library[:6] != b"\x7fELF\x02\x01":
        return len(library)
    (table,) = struct.unpack_from("<Q", library, SEGMENTS_AT)
    size, count = struct.unpack_from("<HH", library, SEGMENTS_SIZE)
    ends = [0]
    for start in range(table, table + size * count, size):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", library, start)
        ends += [offset + length] if kind == LOADED else []
    return max(ends)

"""One stage per GPU at a time, among all runs of a machine.

A GPU is held by an flock on a file of its own in the machine's folder for temporary files. The
kernel drops the lock with the process that took it, however that ends, so no lock is ever stale.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from flows.host import files

VISIBLE = "CUDA_VISIBLE_DEVICES"
LIST = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
AGAIN = 1.0  # seconds between two looks for a free GPU


@contextmanager
def held(device: str) -> Iterator[Mapping[str, str]]:
    """Hold a GPU while the block lasts; what the environment of a stage needs in order to use it.

    ``device`` is the recipe's ``machine.device``. On "cpu", and on a machine without a GPU, there
    is nothing to hold. Waits until a GPU is free.
    """
    names = visible() if device == "cuda" else []
    if not names:
        yield {}
        return
    name, lock = _first_free(names)
    with lock:
        yield {VISIBLE: name}


def visible() -> list[str]:
    """The ids of the GPUs that this process may use, the same for every process of the machine."""
    with suppress(OSError, subprocess.CalledProcessError):
        listed = subprocess.run(LIST, capture_output=True, text=True, check=True).stdout
        ids = dict(line.split(", ") for line in listed.split("\n") if ", " in line)
        chosen = os.environ.get(VISIBLE)
        if chosen is None:
            return list(ids.values())
        return [ids.get(entry, entry) for entry in chosen.split(",") if entry.strip()]
    return []


def _first_free(names: list[str]) -> tuple[str, IO[str]]:
    """The first GPU that nobody holds, and its lock."""
    said = False
    while True:
        for name in names:
            if lock := _lock(name):
                return name, lock
        if not said:
            count = len(names)
            print(f"waiting: every GPU here has a stage of its own ({count} in all)", flush=True)
            said = True
        time.sleep(AGAIN)


def _lock(name: str) -> IO[str] | None:
    """The locked file of a GPU; None where another process has it."""
    path = Path(tempfile.gettempdir(), f"beamline-gpu-{name}.lock")
    with suppress(FileExistsError):  # a shared folder refuses "w" on files of other users
        path.touch(mode=0o644, exist_ok=False)
    file = path.open()
    if files.lock(file):
        return file
    file.close()
    return None

"""Reserve a GPU for one stage at a time, among all runs of a machine.

A GPU is reserved by a lock on a file of its own in the machine's folder for temporary files. The
kernel releases it when the process that holds it ends, so no lock is ever stale.
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
AGAIN = 1.0  # seconds between two attempts


@contextmanager
def held(device: str) -> Iterator[Mapping[str, str]]:
    """Reserve a GPU during the block; yield the environment variables that a stage needs to use it.

    ``device`` is the recipe's ``machine.device``. On "cpu", and on a machine without a GPU, nothing
    is reserved. Waits until a GPU is free.
    """
    names = visible() if device == "cuda" else []
    if not names:
        yield {}
        return
    name, lock = _first_free(names)
    with lock:
        yield {VISIBLE: name}


def visible() -> list[str]:
    """List the ids of the GPUs that this process may use; ids are the same in every process."""
    with suppress(OSError, subprocess.CalledProcessError):
        listed = subprocess.run(LIST, capture_output=True, text=True, check=True).stdout
        ids = dict(line.split(", ") for line in listed.split("\n") if ", " in line)
        chosen = os.environ.get(VISIBLE)
        if chosen is None:
            return list(ids.values())
        return [ids.get(entry, entry) for entry in chosen.split(",") if entry.strip()]
    return []


def _first_free(names: list[str]) -> tuple[str, IO[str]]:
    """Wait for a free GPU; return its name and its lock."""
    logged = False
    while True:
        for name in names:
            if lock := _lock(name):
                return name, lock
        if not logged:
            count = len(names)
            print(f"waiting: all {count} GPUs of this machine are in use", flush=True)
            logged = True
        time.sleep(AGAIN)


def _lock(name: str) -> IO[str] | None:
    """Return the locked file of a GPU; None where another process holds it."""
    path = Path(tempfile.gettempdir(), f"beamline-gpu-{name}.lock")
    with suppress(
        FileExistsError
    ):  # in a shared folder, files of other users cannot be opened for writing
        path.touch(mode=0o644, exist_ok=False)
    file = path.open()
    if files.lock(file):
        return file
    file.close()
    return None

"""Reserve GPUs for one stage at a time, among all runs of a machine.

A GPU is reserved by a lock on a file of its own in the machine's folder for temporary files. The
kernel releases it when the process that holds it ends, so no lock is ever stale.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from flows.host import files
from params.schema.base import Machine
from tasks.learning.learner_group import LAUNCH

VISIBLE = "CUDA_VISIBLE_DEVICES"
LIST = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
LEARNING = ("cold_start", "reinforce")  # stages whose learner processes take a GPU each
AGAIN = 1.0  # seconds between two attempts


@contextmanager
def held(stage: str, machine: Machine) -> Iterator[Mapping[str, str]]:
    """Reserve a GPU during the block, and for a stage that learns one for each learner process.

    Yield the environment variables that the stage needs to use them. On a CPU, and on a machine
    without a GPU, nothing is reserved. Waits until enough GPUs are free. Raises ValueError where
    the machine has too few, unless the processes are started elsewhere, too (BEAMLINE_LAUNCH).
    """
    names = visible() if machine.device == "cuda" else []
    if not names:
        yield {}
        return
    count = machine.processes if stage.partition("@")[0] in LEARNING else 1
    if count > len(names):
        if LAUNCH not in os.environ:
            raise ValueError(too_few(count, len(names)))
        count = len(names)
    with ExitStack() as locks:
        yield {VISIBLE: ",".join(_reserved(names, count, locks))}


def too_few(processes: int, gpus: int) -> str:
    """Return the message for a machine with fewer GPUs than learner processes."""
    return (
        f"'machine.processes' = {processes}, and this machine has {gpus} GPUs that it may use: "
        f"lower it, or start the processes on several machines with {LAUNCH} (docs/deployments.md)"
    )


def visible() -> list[str]:
    """List the ids of the GPUs that this process may use; ids are the same in every process."""
    with suppress(OSError, subprocess.CalledProcessError):
        listed = subprocess.run(LIST, capture_output=True, text=True, check=True).stdout
        ids = dict(line.split(", ") for line in listed.split("\n") if ", " in line)
        devices = os.environ.get(VISIBLE)
        if devices is None:
            return list(ids.values())
        return [ids.get(entry, entry) for entry in devices.split(",") if entry.strip()]
    return []


def _reserved(names: list[str], count: int, locks: ExitStack) -> list[str]:
    """Wait until ``count`` GPUs are free at once, lock them, and return their names.

    Nothing stays locked while it waits: two stages that each hold a half would wait for ever.
    """
    logged = False
    while True:
        with ExitStack() as some:
            free: list[str] = []
            for name in names:
                if len(free) < count and (lock := _lock(name)):
                    free.append(name)
                    some.enter_context(lock)
            if len(free) == count:
                locks.push(some.pop_all())
                return free
        if not logged:
            print(
                f"waiting: {len(free)} of {len(names)} GPUs of this machine are free, and this "
                f"stage takes {count}",
                flush=True,
            )
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

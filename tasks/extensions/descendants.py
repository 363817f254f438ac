"""End all processes that a process has started, those that left its group or session included.

A process whose parent has ended is given to the nearest ancestor that adopts orphans, else to
``init``, where nothing shows any more who started it. A guard that adopts them finds them all.
Standard library alone: guards start without others.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

# Environment variable of guarded processes: the folder that their run works in. Where a guard
# itself is killed, the doctor finds by it what is left.
OWNER = "BEAMLINE_OWNER"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # from linux/prctl.h
PATIENCE = 3.0  # seconds for killed processes to end; those that start new ones are killed again


def adopt_orphans() -> None:
    """Have orphans below this process given to it, not to ``init``."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_at_parents_end(number: int, parent: int | None = None) -> None:
    """Have the kernel send this process a signal when the thread that started it ends.

    Where the process of id ``parent`` has ended before the kernel was told, it is sent at once.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)


def owned(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that names the folder that this process works in."""
    return {**environment, OWNER: str(Path.cwd())}


def descendants() -> list[int]:
    """Return the ids of the living processes below this one."""
    children: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdecimal():
            with suppress(OSError, IndexError, ValueError):
                parent, living = _parent(int(name))
                children[parent].append(int(name) if living else -int(name))
    below, new = [], [os.getpid()]
    while new:
        new = [abs(child) for parent in new for child in children[parent]]
        below += new
    dead = {-child for each in children.values() for child in each if child < 0}
    return [process for process in below if process not in dead]


def _parent(process: int) -> tuple[int, bool]:
    """Return the parent of a process, and whether it lives."""
    with open(f"/proc/{process}/stat", "rb") as file:  # noqa: PTH123
        state, parent = file.read().rpartition(b") ")[2].split()[:2]
    return int(parent), state not in (b"Z", b"X")


def end_descendants() -> None:
    """Kill all processes below this one, again and again until there are none, and reap them.

    None are left when two looks in turn find none: processes are read one after the other, and one
    whose parent ends and is reaped between the two readings seems to be nobody's. Then it has been
    given to this process, which the next look sees.
    """
    until = time.monotonic() + PATIENCE
    while (living := descendants() or descendants()) and time.monotonic() < until:
        for process in living:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.002)
        _reap()
    _reap()


def _reap() -> None:
    """Take the exit status of children that have ended, so that they are no zombies."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass

"""Bound the memory of a sandbox's processes together by a control group of Linux.

Only some users may make one: root outside of most containers, and the users of a system whose
service manager has delegated a part of the tree to them. Where there is none, the sandbox's
supervisor counts by itself (python_worker.py), which is slower to notice.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.tools import python_worker

MOUNTED = Path("/sys/fs/cgroup")
PREFIX = "beamline"
NUMBERS = itertools.count()
PATIENCE = 2.0  # seconds until a killed process has left its group


@dataclass(frozen=True)
class Version:
    """The files of a version of control groups: the limits, and the count of kills."""

    limits: tuple[str, ...]
    without_swap: tuple[tuple[str, str], ...]  # file and value, where it exists
    events: str


V1 = Version(("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), (), "memory.oom_control")
V2 = Version(("memory.max",), (("memory.swap.max", "0"),), "memory.events")


@dataclass(frozen=True)
class Group:
    """A control group, and open descriptors of its lists of members and of events."""

    folder: Path
    members: int
    events: int

    def kills(self) -> int:
        """Return how many of its processes the kernel has killed for memory."""
        return python_worker.killed_for_memory(self.events)

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.members)
        os.close(self.events)

    def remove(self) -> None:
        """Remove the group, whose processes have been killed; leave it if they do not end."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.01)


def make_group(limit_bytes: int) -> Group | None:
    """Make a control group of at most ``limit_bytes``; return None where this user may not."""
    for parent, version in _places():
        _remove_leftovers(parent)
        folder = parent / f"{PREFIX}-{os.getpid()}-{next(NUMBERS)}"
        with suppress(OSError):
            folder.mkdir()
            try:
                return _limited(folder, version, limit_bytes)
            except OSError:
                folder.rmdir()
    return None


def _limited(folder: Path, version: Version, limit_bytes: int) -> Group:
    first, *more = version.limits
    (folder / first).write_text(str(limit_bytes))
    for name, value in [(name, str(limit_bytes)) for name in more] + [*version.without_swap]:
        with suppress(OSError):  # a kernel that does not count swap
            (folder / name).write_text(value)
    events = os.open(folder / version.events, os.O_RDONLY)
    return Group(folder, os.open(folder / "cgroup.procs", os.O_WRONLY), events)


def _places() -> Iterator[tuple[Path, Version]]:
    """Yield where a group with a limit of memory may be made, nearest to this process first."""
    file = Path("/proc/self/cgroup")
    for line in file.read_text().splitlines() if file.exists() else ():
        _, controllers, path = line.split(":", 2)
        group = Path(path.lstrip("/"))
        if "memory" in controllers.split(","):
            yield MOUNTED / "memory" / group, V1
        if not controllers:
            for folder in (MOUNTED / group, *(MOUNTED / parent for parent in group.parents)):
                with suppress(OSError):
                    if "memory" in (folder / "cgroup.subtree_control").read_text().split():
                        yield folder, V2


def _remove_leftovers(parent: Path) -> None:
    """Remove the empty groups of processes that have ended."""
    for folder in parent.glob(f"{PREFIX}-*-*"):
        if not Path("/proc", folder.name.split("-")[1]).exists():
            with suppress(OSError):
                folder.rmdir()

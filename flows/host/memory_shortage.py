"""Tell from an error that memory was short, and say how much there was and what helps.

A lack of memory has many names: Python, torch, Arrow, the dynamic loader, OpenBLAS and the kernel
each report it in their own way, and some of them name only what they could not load or start.
"""

from __future__ import annotations

import errno
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

GIB = 2**30
SIGNS = re.compile(  # in what is reported, in any case
    "|".join(
        [
            r"failed to map segment|cannot (?:allocate|create) (?:memory|TLS|executable memory)",
            r"can't allocate memory|not enough memory|unable to allocate|failed to allocate",
            r"\bstd::bad_alloc|\bbad_alloc\b|(?:m|re)alloc of size \d+ failed|\bmmap failed",
            r"can't start new thread|pthread_create failed|thread creation failed",
            r"insufficient memory|memory allocation of \d+ bytes failed|\bENOMEM\b",
        ]
    ),
    re.IGNORECASE,
)
OF_THE_GPU = re.compile(r"(?:CUDA|HIP|GPU).{0,40}out of memory", re.IGNORECASE)
STARTING = ("_fork_exec", "fork", "_execute_child", "_launch", "forkpty")  # functions
KILLS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))  # with a line oom_kill
HELP = (
    "make plan RECIPE={recipe} lists what needs how much; less is needed with a smaller "
    "reinforce.update.micro_batch_tokens, reinforce.rollout.rows, cold_start.micro_batch or "
    "machine.processes, and with fewer programs beside it. What has ended is kept: the same call "
    "goes on"
)


# ---------------------------------------------------------------- signs


def is_short(error: BaseException) -> bool:
    """Return whether memory, or the room for another process or thread, was short."""
    return any(
        isinstance(each, MemoryError)
        or (isinstance(each, OSError) and each.errno == errno.ENOMEM)
        or (isinstance(each, BlockingIOError) and _at_a_start(each.__traceback__))
        or SIGNS.search(str(each)) is not None
        for each in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it comes from, each once."""
    waiting, seen = [error], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        inner = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        waiting += [cause for cause in (each.__cause__, each.__context__, *inner) if cause]


def _at_a_start(trace: TracebackType | None) -> bool:
    """Return whether a process was to be started: sockets raise such errors for other reasons."""
    while trace:
        if trace.tb_frame.f_code.co_name in STARTING:
            return True
        trace = trace.tb_next
    return False


def kernel_kills() -> int:
    """Count the processes that the kernel has killed for lack of memory since the machine began."""
    count = 0
    for file in KILLS:
        with suppress(OSError, ValueError):
            lines = (line.split() for line in file.read_text().splitlines())
            count += sum(int(line[1]) for line in lines if line[0] == "oom_kill")
    return count


# ---------------------------------------------------------------- what is said


def explained(error: BaseException, recipe: str) -> str | None:
    """Return what happened, how much memory there was and what helps; None for other errors."""
    said = str(error).strip().partition("\n")[0]
    if OF_THE_GPU.search(str(error)):
        return f"{said} The GPU's memory is short: {HELP.format(recipe=recipe)}"
    if not is_short(error):
        return None
    return f"{type(error).__name__}: {said}. {shortage(recipe)}".replace(": . ", ". ")


def shortage(recipe: str) -> str:
    """Return how much memory there is now, by whose limit, and what helps."""
    remedy = f" {HELP.format(recipe=recipe)}" if recipe else ""
    return f"Memory is short: {_state()}.{remedy}"


def _state() -> str:
    facts = []
    with suppress(OSError, ValueError, KeyError):
        sizes = _sizes(Path("/proc/meminfo"))
        facts.append(
            f"{_gib(sizes['MemAvailable'])} of this machine's {_gib(sizes['MemTotal'])} are free"
        )
    with suppress(OSError, ValueError):
        allowed = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        facts.append(f"the container may have {_gib(allowed)} and has {_gib(used)}")
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        facts.append(f"a process may have {_gib(limit)} of addresses (ulimit -v)")
    return ", ".join(facts) or "how much there is cannot be read"


def main_memory() -> int | None:
    """Return the bytes of main memory that this machine or its container has; None: unknown."""
    found = []
    with suppress(OSError, ValueError, KeyError):
        found.append(_sizes(Path("/proc/meminfo"))["MemTotal"])
    with suppress(OSError, ValueError):
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(found, default=None)


def _sizes(file: Path) -> dict[str, int]:
    """Return the sizes in bytes that a file such as /proc/meminfo lists in kB."""
    lines = (line.partition(":") for line in file.read_text().splitlines())
    return {name: 1024 * int(value.split()[0]) for name, _, value in lines}


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def report(error: BaseException, recipe: str) -> None:
    """Print about the memory what the traceback of an error does not say, if that was short."""
    if is_short(error):
        print(shortage(recipe), file=sys.stderr)


def report_kills(before: int, recipe: str) -> None:
    """Say so if the kernel has killed processes since it had killed ``before`` of them."""
    if kernel_kills() > before:
        print(
            f"meanwhile the kernel has killed a process for lack of memory. {shortage(recipe)}",
            file=sys.stderr,
        )

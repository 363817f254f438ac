"""Process-wide settings for every flow; they must run before heavy imports."""

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

# `python -m flows.plan` runs flows/commands/plan.py. Code imports it as flows.commands.plan.
__path__ += [os.path.join(__path__[0], room) for room in ("stages", "commands")]  # noqa: PTH118

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
UNREAD = 120  # Python's exit status where its output could not be written

os.environ.setdefault("DO_NOT_TRACK", "1")
# Threads that spin while they wait take cores from those that work: a training step then takes four
# times as long where anything else runs on the machine. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A library that uses fewer threads under load adds in another order, and equal runs would differ.
os.environ.setdefault("MKL_DYNAMIC", "FALSE")
os.environ.setdefault("OMP_DYNAMIC", "FALSE")
M_ARENA_MAX = -8  # of glibc's mallopt(3): the number of heaps


def _share_one_heap() -> None:
    """Let all threads take memory from one heap, before any other has been made.

    Each thread may have its own, which keeps what is freed there. Training of a policy of 135
    million weights, whose lanes are new threads each time, grew to 16 GiB instead of 7.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(M_ARENA_MAX, 1)


_share_one_heap()
if any(name.lower().endswith("_proxy") for name in os.environ):
    from flows.host import proxies

    if sys.argv[0] == "-m" and (faults := proxies.faults(os.environ)):
        print(*faults, sep="\n", file=sys.stderr)
        sys.exit(2)
    proxies.keep_loopback_direct()  # of this program, and of all that it starts
if sys.argv[0] == "-m":
    from flows.host import first_check

    first_check.check(sys.orig_argv)  # exits where a stage cannot run
if sys.argv[0] == "-m" and os.environ.get("BEAMLINE_WARM", "off") != "off":
    from flows.host.warm import hand_over

    hand_over()  # does not return where another process runs the program
if sys.argv[0] == "-m":  # python -m flows.<program>, whose main calls end_import_phase
    sys.excepthook = lambda *raised: _and_memory(sys.__excepthook__)(*raised)
    gc.disable()  # imports make a million lasting objects; collecting them takes two seconds
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the imports without a traceback


def _and_memory(print_error: Hook) -> Hook:
    """Return a function that prints an error that ends this program, and that memory was short.

    Libraries that cannot be loaded for lack of memory end the imports.
    """

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        print_error(kind, error, trace)
        from pathlib import Path

        from flows.host import memory_shortage

        named = [name for name in sys.argv[1:2] if Path("params", f"{name}.yaml").is_file()]
        memory_shortage.report(error, "".join(named))

    return report


def end_import_phase() -> None:
    """Re-enable garbage collection and KeyboardInterrupt, and guard the program's logs."""
    from flows.host.addresses import keep_passwords_from_logs

    keep_passwords_from_logs()
    sys.excepthook = _and_memory(sys.excepthook)
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # nohup ignores it
        signal.signal(signal.SIGHUP, signal.default_int_handler)  # a terminal that is closed


def exit_fast(status: int) -> NoReturn:
    """Exit without freeing the memory, object by object, which takes most of a second.

    As at any exit of Python, threads end first, then the functions of ``atexit`` run, and what was
    printed is written. A profiler or a debugger gets the exit of Python itself.
    """
    if sys.getprofile() or sys.gettrace():
        sys.exit(status)
    threading._shutdown()  # type: ignore[attr-defined]
    with suppress(Exception):  # it was printed
        atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads any more
        status = status or UNREAD
    os._exit(status)

"""The settings of a process that code can change for all others in it: kept over an import."""

from __future__ import annotations

import locale
import logging
import os
import random
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

Restore = Callable[[], object]
NO_HANDLERS = {signal.SIGKILL, signal.SIGSTOP}


@contextmanager
def kept() -> Iterator[None]:
    """Restore after the block what it has changed for the whole process.

    These are the folder, the umask, variables of the environment, standard streams, handlers and
    timers of signals, random numbers, warnings, logging, the locale, limits of Python and sockets,
    and settings of NumPy and torch, where they are loaded.
    """
    restores = [save() for save in (_of_python, _of_logging, _of_signals, _of_numpy, _of_torch)]
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _of_python() -> Restore:
    folder, variables, umask = Path.cwd(), dict(os.environ), os.umask(0)
    os.umask(umask)
    streams = sys.stdin, sys.stdout, sys.stderr
    limits, timeout = sys.getrecursionlimit(), socket.getdefaulttimeout()
    chance, words = random.getstate(), locale.setlocale(locale.LC_ALL)

    def restore() -> None:
        os.chdir(folder)
        os.umask(umask)
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        sys.stdin, sys.stdout, sys.stderr = streams
        with suppress(RecursionError):  # it is lower than the stack is deep
            sys.setrecursionlimit(limits)
        socket.setdefaulttimeout(timeout)
        random.setstate(chance)
        with suppress(locale.Error):
            locale.setlocale(locale.LC_ALL, words)

    return restore


def _of_logging() -> Restore:
    root, filters = logging.getLogger(), list(warnings.filters)
    handlers, level, disabled = list(root.handlers), root.level, root.manager.disable

    def restore() -> None:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.disable(disabled)
        warnings.resetwarnings()
        for one in reversed(filters):
            warnings.filters.insert(0, one)  # type: ignore[attr-defined]

    return restore


def _of_signals() -> Restore:
    if threading.current_thread() is not threading.main_thread():  # no other may set handlers
        return lambda: None
    numbers = signal.valid_signals() - NO_HANDLERS
    handlers = {number: signal.getsignal(number) for number in numbers}
    timed = signal.getitimer(signal.ITIMER_REAL)

    def restore() -> None:
        if timed == (0.0, 0.0):  # else it is another's, and goes on
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)  # None: it was not set from Python

    return restore


def _of_numpy() -> Restore:
    numpy = sys.modules.get("numpy")
    errors = numpy.geterr() if numpy else None
    chance = numpy.random.get_state() if numpy else None

    def restore() -> None:
        if numpy and errors and chance is not None:
            numpy.seterr(**errors)
            numpy.random.set_state(chance)

    return restore


def _of_torch() -> Restore:
    before = _torch_settings() if "torch" in sys.modules else {}

    def restore() -> None:
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return
        given = {"grad": True, "dtype": torch.float32, "deterministic": False, **before}
        torch.set_grad_enabled(given["grad"])
        torch.set_default_dtype(given["dtype"])
        if torch.are_deterministic_algorithms_enabled() != given["deterministic"]:
            torch.use_deterministic_algorithms(given["deterministic"])
        if "threads" in given and torch.get_num_threads() != given["threads"]:
            torch.set_num_threads(given["threads"])
        if "chance" in given:
            torch.set_rng_state(given["chance"])
        torch.set_default_device(None)  # as it is everywhere here

    return restore


def _torch_settings() -> dict[str, Any]:
    torch: Any = sys.modules["torch"]
    return {
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "chance": torch.get_rng_state(),
    }

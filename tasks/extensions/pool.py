"""Run a user's code in processes of its own, each call with a time limit.

The code is outside the sandbox: it may do what its user may. The processes protect the trainer from
what goes wrong in it: an exception, an endless loop, the end of the process, a result that is no
JSON or too large. Each of these is a reply that names the failure; none raises an error here.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.extensions import descendants, user_code_worker
from tasks.extensions.user_code_worker import DIED, TIMEOUT
from tasks.extensions.waiting import is_readable

REPLY_BYTES = 2**20  # most of a reply
START_SECONDS = 120.0  # to import the code, on a busy machine
END_SECONDS = 5.0  # for a guard to report
PROJECT = Path(__file__).resolve().parents[2]

BROKEN = (OSError, ValueError, TypeError, RecursionError)  # a channel that ended, or holds no reply

Request = tuple[int, str, Sequence[Any]]  # slot of a worker, method, arguments of JSON


@dataclass(frozen=True)
class Reply:
    """What a call returned; or a failure of user_code_worker.py by name, and what is known."""

    value: Any = None
    failure: str | None = None
    message: str = ""


@contextmanager
def open_pool(
    reference: str, settings: Mapping[str, Any], workers: int, seconds: float
) -> Iterator[Pool]:
    """Start processes that have loaded ``reference``; all of them end with the block.

    ``reference`` is ``<file>:<name>``, such as "own/weather.py:Weather": a function, or a class of
    which each process makes one object with these ``settings``. Each call may take ``seconds``.
    Raises RuntimeError with the reason where the code cannot be loaded.
    """
    if workers < 1:
        raise ValueError(f"{reference}: needs at least one worker, got {workers}: raise it")
    pool = Pool(reference, settings, workers, seconds)
    try:
        pool.start()
        yield pool
    finally:
        pool.close()


class Pool:
    """Processes in numbered slots. A process that has ended is replaced by its next request."""

    def __init__(
        self, reference: str, settings: Mapping[str, Any], workers: int, seconds: float
    ) -> None:
        self.reference, self.settings, self.seconds = reference, dict(settings), seconds
        self.team: list[_GuardedWorker | None] = [None] * workers
        self.closed = False
        # Each slot has a thread of its own. It starts the processes of the slot, because a
        # process is ended with the thread that started it, and it asks them one after the other.
        self.threads = [ThreadPoolExecutor(1, f"pool-{slot}") for slot in range(workers)]

    def ask(self, requests: Sequence[Request]) -> list[Reply]:
        """Answer the requests: side by side over the slots, in their order in each slot.

        Where a process ends or exceeds its seconds, its request has failed, and the next one at
        this slot is answered by a new process, which has nothing of the old one's state.
        """
        replies: dict[int, Reply] = {}

        def serve(slot: int, mine: Sequence[int]) -> None:
            for index in mine:
                _, method, arguments = requests[index]
                replies[index] = self._call(slot, method, arguments)

        waiting = []
        for slot in sorted({slot for slot, _, _ in requests}):
            mine = [index for index, request in enumerate(requests) if request[0] == slot]
            waiting.append(self.threads[slot].submit(serve, slot, mine))
        for job in waiting:
            job.result()
        return [replies[index] for index in range(len(requests))]

    def call_all(self, arguments: Sequence[Sequence[Any]]) -> list[Reply]:
        """Call the function, or the object, once with each list of arguments; replies in order.

        The calls are dealt over the processes as these get free, so they must not depend on each
        other. A process may be killed from outside, which is no fault of a call: only a call in
        which two processes end has the failure DIED.
        """
        replies: dict[int, Reply] = {}
        left = deque(range(len(arguments)))

        def serve(slot: int) -> None:
            with suppress(IndexError):  # another thread may have taken the last one
                while True:
                    index = left.popleft()
                    reply = self._call(slot, "", arguments[index])
                    if reply.failure == DIED:
                        reply = self._call(slot, "", arguments[index])
                    replies[index] = reply

        slots = range(min(len(self.team), len(arguments)))
        for job in [self.threads[slot].submit(serve, slot) for slot in slots]:
            job.result()
        return [replies[index] for index in range(len(arguments))]

    def start(self) -> None:
        """Start all processes. Raises RuntimeError where the code cannot be loaded."""
        slots = range(len(self.team))
        for job in [self.threads[slot].submit(self._started, slot) for slot in slots]:
            job.result()

    def close(self) -> None:
        """End all processes, also those that are in a call."""
        self.closed = True
        for process in [held.process for held in self.team if held]:
            _let_go(process)
        for thread in self.threads:
            thread.shutdown(cancel_futures=True)
        for held in self.team:
            if held:
                _end(held)

    def _call(self, slot: int, method: str, arguments: Sequence[Any]) -> Reply:
        try:
            held = self._started(slot)
        except RuntimeError as error:
            return Reply(failure=DIED, message=str(error))
        try:
            return _exchange(held, [method, list(arguments)], self.seconds)
        except TimeoutError:
            self._forget(slot)
            return Reply(failure=TIMEOUT, message=f"no answer within {self.seconds:g} seconds")
        except BROKEN as error:
            report = self._forget(slot)
            how = "ended" if isinstance(error, OSError) else f"was ended: {error}"
            return Reply(failure=DIED, message=f"the process {how}{report}")

    def _started(self, slot: int) -> _GuardedWorker:
        """Return the process in a slot, a new one where there is none."""
        held = self.team[slot]
        if held and _has_ended(held):
            self._forget(slot)
        elif held:
            return held
        if self.closed:
            raise RuntimeError(f"{self.reference}: the processes have been ended")
        held = self.team[slot] = _start()
        order = {"reference": self.reference, "settings": self.settings, "limit": REPLY_BYTES}
        try:
            reply = _exchange(held, order, START_SECONDS)
        except BROKEN:
            reply = Reply(failure=DIED, message=f"the process did not start{_end(held)}")
        if reply.failure:
            self._forget(slot)
            named = (self.settings.get(key) for key in ("reference", "world"))
            whose = next(filter(None, named), self.reference)  # a user's, whom a host stands for
            raise RuntimeError(f"{whose}: {reply.message}")
        return held

    def _forget(self, slot: int) -> str:
        held, self.team[slot] = self.team[slot], None
        return _end(held) if held else ""


@dataclass(frozen=True)
class _GuardedWorker:
    """A guard with its process, and the channel to the latter."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of the next requests


def _start() -> _GuardedWorker:
    ours, theirs = socket.socketpair()
    paths = [str(PROJECT), os.environ.get("PYTHONPATH", "")]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", user_code_worker.__name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,  # its end tells the guard that the trainer has ended
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Sets of texts have one order in every process, so equal seeds give equal episodes.
            env=descendants.owned(os.environ)
            | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True,  # Ctrl-C at the terminal is for the trainer only
        )
    return _GuardedWorker(process, ours)


def _exchange(held: _GuardedWorker, message: Any, seconds: float) -> Reply:
    """Send a message and return the reply to it. Raises TimeoutError and others of BROKEN."""
    deadline = time.monotonic() + seconds
    number = next(held.numbers)
    held.channel.settimeout(seconds)
    user_code_worker.send(held.channel, json.dumps([number, message]).encode())
    (length,) = struct.unpack(">I", _read(held.channel, 4, deadline))
    if length > 2 * REPLY_BYTES:
        raise ValueError("the channel holds no reply")
    fields = dict(json.loads(_read(held.channel, length, deadline)))
    if fields.pop("number", None) != number:
        raise ValueError("it answered another call than the last one")
    return Reply(**fields)


def _read(channel: socket.socket, count: int, deadline: float) -> bytes:
    """Read exactly ``count`` bytes before the deadline."""
    data = bytearray()
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no reply")
        channel.settimeout(left)
        chunk = channel.recv(count - len(data))
        if not chunk:
            raise ConnectionResetError("the process has ended")
        data += chunk
    return bytes(data)


def _has_ended(held: _GuardedWorker) -> bool:
    """Return whether an idle process has closed its channel: it says nothing by itself."""
    return is_readable(held.channel)


def _let_go(process: subprocess.Popen[bytes]) -> None:
    """Close the pipe whose end makes the guard end all."""
    with suppress(OSError):
        assert process.stdin
        process.stdin.close()


def _end(held: _GuardedWorker) -> str:
    """End a guard with its processes; return how it ended and what it printed, in brackets."""
    held.channel.close()
    _let_go(held.process)
    output = b""
    try:
        assert held.process.stdout
        if held.process.stdout.closed:  # ended before
            return ""
        held.process.stdin = None
        output = held.process.communicate(timeout=END_SECONDS)[0]
    except subprocess.TimeoutExpired:
        held.process.kill()
        held.process.communicate()
    report = _reported(output.decode(errors="replace"))
    return f" ({report})" if report else ""


def _reported(output: str) -> str:
    """Return exit status and last lines from a guard's report, or its output where it broke."""
    try:
        report = json.loads(output)
        status, printed = report["status"], report["printed"][-user_code_worker.SHOWN :].strip()
    except (ValueError, TypeError, KeyError):
        return output[-user_code_worker.SHOWN :].strip()
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    return f"{how}; it printed: {printed}" if printed else how

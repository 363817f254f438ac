"""A session in a process of its own: what a lane of sampling runs in beside the trainer's own.

A decoding step of a small policy is hundreds of operations of some microseconds, and Python's lock
changes hands at each: two threads that sample side by side take as long as one after the other,
two processes half of it. A worker is started once, serves one session after another, and ends
when this process does, however that ends: its channel closes.
"""

from __future__ import annotations

import atexit
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tasks.engines import Request, Sample
from tasks.engines.decoder import Decoder, network
from tasks.engines.ragged import RaggedSession

ROOT = Path(__file__).parents[2]  # where a worker finds the project
INSIDE = "import sys; from tasks.engines import worker; worker.serve(int(sys.argv[1]))"


@dataclass(frozen=True)
class Opening:
    """What a worker is told of a session: the weights of now, and ``RaggedSession``'s arguments."""

    decoder: Decoder
    arguments: Sequence[Any]
    deterministic: bool


@dataclass(frozen=True)
class Worker:
    """A process, idle or with one session."""

    process: subprocess.Popen[bytes]
    channel: Connection


class SessionApart:
    """A session that lives in a worker. See ``tasks.engines.Session``.

    Its handles are counted here as they are there, so that only samples are waited for; a path
    too many is therefore refused when the next turn is sampled.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.handles = 0
        self.untold: list[tuple[Any, ...]] = []  # calls that go along with the next turn

    def open(self) -> int:
        return self._new("open")

    def fork(self, handle: int) -> int:
        return self._new("fork", handle)

    def close(self, handle: int) -> None:
        self.untold.append(("close", handle))

    def sample(self, requests: Sequence[Request]) -> list[Sample]:
        told, self.untold = self.untold, []
        _tell(self.worker, (torch.get_num_threads(), told, requests))
        answer = _hear(self.worker)
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    def _new(self, *call: Any) -> int:
        self.untold.append(call)
        self.handles += 1
        return self.handles


@contextmanager
def session_apart(decoder: Decoder, *arguments: Any) -> Iterator[SessionApart]:
    """A session in a worker; ``arguments`` are those of ``RaggedSession`` after its network.

    Raises RuntimeError where the worker has ended by itself.
    """
    worker = _idle.pop() if _idle else _start()
    try:
        deterministic = torch.are_deterministic_algorithms_enabled()
        _tell(worker, Opening(decoder, arguments, deterministic))
        yield SessionApart(worker)
        _tell(worker, None)
    except BaseException:
        _stop(worker)  # who knows what it is in the middle of
        raise
    _idle.append(worker)


_idle: list[Worker] = []


def _start() -> Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", INSIDE, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            start_new_session=True,  # an interrupt at the terminal is for the trainer, not for it
        )
    return Worker(process, Connection(ours.detach()))


def _stop(worker: Worker) -> None:
    worker.channel.close()
    worker.process.kill()
    worker.process.wait()


@atexit.register
def _stop_all() -> None:
    while _idle:
        _stop(_idle.pop())


def _tell(worker: Worker, message: Any) -> None:
    try:
        _send(worker.channel, message)
    except OSError as error:
        raise _ended(worker) from error


def _hear(worker: Worker) -> Any:
    try:
        return _receive(worker.channel)
    except (OSError, EOFError) as error:
        raise _ended(worker) from error


def _ended(worker: Worker) -> RuntimeError:
    with suppress(subprocess.TimeoutExpired):
        worker.process.wait(1.0)
    status = worker.process.returncode
    return RuntimeError(
        f"a process that samples has ended (status {status}; -9 is often a lack of memory): "
        "call again, or lower machine.threads, so that fewer of them run"
    )


def _send(channel: Connection, message: Any) -> None:
    channel.send_bytes(pickle.dumps(message))  # ``send`` would hand tensors over by descriptor


def _receive(channel: Connection) -> Any:
    return pickle.loads(channel.recv_bytes())


# ---- the inside of a worker


def serve(descriptor: int) -> None:
    """One session after another, until the other side of the channel is gone."""
    channel = Connection(descriptor)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    with suppress(EOFError, ConnectionError):
        while True:
            opening: Opening = _receive(channel)
            torch.use_deterministic_algorithms(opening.deterministic)
            session = RaggedSession(network(opening.decoder), *opening.arguments)
            while (message := _receive(channel)) is not None:
                _send(channel, _answer(session, *message))
            session.cache.give_back()


def _answer(
    session: RaggedSession, threads: int, calls: Sequence[Sequence[Any]], requests: list[Request]
) -> list[Sample] | Exception:
    """What ``sample`` returns or raises there, after the calls before it."""
    torch.set_num_threads(threads)
    try:
        for name, *arguments in calls:
            getattr(session, name)(*arguments)
        return session.sample(requests)
    except Exception as error:
        error.add_note(traceback.format_exc())
        return error

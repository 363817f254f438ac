"""A session in a process of its own: what a lane of sampling runs in beside the trainer's own.

A decoding step of a small policy is hundreds of operations of some microseconds, and Python's lock
changes hands at each: two threads that sample side by side take as long as one after the other,
two processes half of it. A worker is started once, serves one session after another, and ends
when this process does, however that ends: its channel closes.
"""

from __future__ import annotations

import atexit
import io
import os
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
from torch import Tensor

from tasks.engines.contract import Request, Sample
from tasks.engines.transformers.cache import RaggedSession
from tasks.engines.transformers.decoder import Decoder, network

ROOT = Path(__file__).parents[3]  # where a worker finds the project
INSIDE = (
    "import sys; from tasks.engines.transformers import worker; "
    "worker.main(*map(int, sys.argv[1:]))"
)
MEMORY = 2**29  # bytes, only taken as far as they are used; a decoder holds 2 x LARGEST at most
ALIGNMENT = 64  # bytes, as torch's own allocator's, on which the choice of kernels may depend


@dataclass(frozen=True)
class Worker:
    """A process, idle or with one session."""

    process: subprocess.Popen[bytes]
    channel: Connection
    memory: Tensor  # bytes that both processes see, for the weights of its session


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
    worker = _hired()
    try:
        _tell(worker, (decoder, arguments))
        yield SessionApart(worker)
        _tell(worker, None)
    except BaseException:
        _stop(worker)  # who knows what it is in the middle of
        raise
    _idle.append(worker)


_idle: list[Worker] = []


def _hired() -> Worker:
    """An idle worker that still lives, or a new one."""
    while _idle:
        worker = _idle.pop()
        if worker.process.poll() is None:
            return worker
        _stop(worker)
    return _start()


def _start() -> Worker:
    memory = os.memfd_create("weights")
    os.truncate(memory, MEMORY)
    ours, theirs = socket.socketpair()
    inherited = (theirs.fileno(), memory)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", INSIDE, *map(str, inherited)],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            start_new_session=True,  # an interrupt at the terminal is for the trainer, not for it
        )
    return Worker(process, Connection(ours.detach()), _mapped(memory))


def _mapped(descriptor: int) -> Tensor:
    """The memory behind a descriptor, which is closed."""
    memory = torch.from_file(
        f"/proc/self/fd/{descriptor}", shared=True, size=MEMORY, dtype=torch.uint8
    )
    os.close(descriptor)
    return memory


def _stop(worker: Worker) -> None:
    worker.channel.close()
    worker.process.kill()
    worker.process.wait()


@atexit.register
def _stop_all() -> None:
    while _idle:
        _stop(_idle.pop())


def _tell(worker: Worker, message: Any) -> None:
    """Send a message; its tensors go through the memory, which copies them once."""
    packed = io.BytesIO()
    _Packer(packed, worker.memory).dump(message)
    try:
        worker.channel.send_bytes(packed.getbuffer())
    except OSError as error:
        raise _ended(worker) from error


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, memory: Tensor) -> None:
        super().__init__(file)
        self.memory, self.used = memory, 0

    def persistent_id(self, item: Any) -> Any:
        """Where a tensor has been put: first byte, kind and shape."""
        if not isinstance(item, Tensor):
            return None
        place = (self.used, item.dtype, item.shape)
        _at(self.memory, *place).copy_(item.detach())
        self.used += -(-item.nbytes // ALIGNMENT) * ALIGNMENT
        return place


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: Tensor) -> None:
        super().__init__(file)
        self.memory = memory

    def persistent_load(self, place: Any) -> Tensor:
        return _at(self.memory, *place)


def _at(memory: Tensor, first: int, kind: torch.dtype, shape: torch.Size) -> Tensor:
    return memory[first : first + shape.numel() * kind.itemsize].view(kind).view(shape)


def _hear(worker: Worker) -> Any:
    try:
        return pickle.loads(worker.channel.recv_bytes())
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


# ---- the inside of a worker


def serve(channel: Connection, memory: Tensor) -> None:
    """One session after another, until the other side of the channel is gone."""

    def hear() -> Any:
        return _Unpacker(io.BytesIO(channel.recv_bytes()), memory).load()

    with suppress(EOFError, ConnectionError):
        while True:
            decoder, arguments = hear()
            session = RaggedSession(network(decoder), *arguments)
            while (message := hear()) is not None:
                channel.send_bytes(pickle.dumps(_answer(session, *message)))
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


def main(channel: int, memory: int) -> None:
    """What a worker runs; ``channel`` and ``memory`` are descriptors."""
    serve(Connection(channel), _mapped(memory))

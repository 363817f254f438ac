"""Sessions in worker processes, so that small policies sample in parallel.

A decoding step of a small policy is hundreds of operations of some microseconds each, and Python's
lock is taken at each: two threads that sample in parallel take as long as one after the other, two
processes half of it. A worker is started once, serves one session after another, and ends when
this process ends in any way, because its channel closes.
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

from tasks.engines.contract import Sample, SamplingRequest
from tasks.engines.transformers.cache import RaggedSession, SpareMemory
from tasks.engines.transformers.decoder import Decoder, network

ROOT = Path(__file__).parents[3]  # of the project, where a worker starts
INSIDE = (
    "import sys; from tasks.engines.transformers import sampling_worker; "
    "sampling_worker.main(*map(int, sys.argv[1:]))"
)
MEMORY = 2**29  # bytes of address space; at most 2 numbers per weight, LARGEST weights
ALIGNMENT = 64  # bytes, as torch's own allocator's, on which the choice of kernels may depend


@dataclass(frozen=True)
class Worker:
    """A process that serves one session at a time, or waits for one."""

    process: subprocess.Popen[bytes]
    channel: Connection
    memory: Tensor  # [MEMORY] bytes that both processes map, for the weights of its session

    def send(self, message: Any) -> None:
        """Send a message; its tensors go through the shared memory, which copies them once.

        Raises RuntimeError where the worker has ended.
        """
        packed = io.BytesIO()
        _Packer(packed, self.memory).dump(message)
        try:
            self.channel.send_bytes(packed.getbuffer())
        except OSError as error:
            raise self._ended() from error

    def receive(self) -> Any:
        """Wait for a message. Raises RuntimeError where the worker has ended."""
        try:
            return pickle.loads(self.channel.recv_bytes())
        except (OSError, EOFError) as error:
            raise self._ended() from error

    def stop(self) -> None:
        """Kill the process and wait for its end."""
        self.channel.close()
        self.process.kill()
        self.process.wait()

    def _ended(self) -> RuntimeError:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        status = self.process.returncode
        return RuntimeError(
            f"a process that samples has ended (status {status}; -9 is often a lack of memory): "
            "call again, or lower machine.threads, so that fewer of them run"
        )


class WorkerPool:
    """The idle workers of this process."""

    def __init__(self) -> None:
        self.idle: list[Worker] = []
        atexit.register(self.close)

    @contextmanager
    def worker(self) -> Iterator[Worker]:
        """Lend a worker for one session, an idle one or a new one; an error ends it."""
        worker = self._take()
        try:
            yield worker
        except BaseException:
            worker.stop()  # it may be in the middle of a session
            raise
        self.idle.append(worker)

    def close(self) -> None:
        """End all idle workers."""
        while self.idle:
            self.idle.pop().stop()

    def _take(self) -> Worker:
        while self.idle:
            worker = self.idle.pop()
            if worker.process.poll() is None:
                return worker
            worker.stop()
        return start()


# A worker takes seconds to start, and each rollout opens an engine of its own: idle workers belong
# to the process, which uses them for the rollouts of all iterations.
POOL = WorkerPool()


def start() -> Worker:
    """Start a worker."""
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
            start_new_session=True,  # Ctrl-C at the terminal is for the trainer only
        )
    return Worker(process, Connection(ours.detach()), _mapped(memory))


class WorkerSession:
    """A session that runs in a worker. See ``tasks.engines.Session``.

    Handles are counted here as the worker counts them, so only ``sample`` waits for an answer; a
    path too many is therefore refused when the next turn is sampled.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.handles = 0
        self.unsent: list[tuple[Any, ...]] = []  # calls that are sent with the next turn

    def open(self) -> int:
        return self._new("open")

    def fork(self, handle: int) -> int:
        return self._new("fork", handle)

    def close(self, handle: int) -> None:
        self.unsent.append(("close", handle))

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Sample]:
        calls, self.unsent = self.unsent, []
        self.worker.send((torch.get_num_threads(), calls, requests))
        answer = self.worker.receive()
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    def _new(self, *call: Any) -> int:
        self.unsent.append(call)
        self.handles += 1
        return self.handles


@contextmanager
def worker_session(pool: WorkerPool, decoder: Decoder, *arguments: Any) -> Iterator[WorkerSession]:
    """Open a session in a worker of the pool.

    ``arguments`` are those of ``RaggedSession`` after its memory. Raises RuntimeError where the
    worker has ended by itself.
    """
    with pool.worker() as worker:
        worker.send((decoder, arguments))
        yield WorkerSession(worker)
        worker.send(None)


def _mapped(descriptor: int) -> Tensor:
    """Map the memory of a descriptor as [MEMORY] bytes, and close the descriptor."""
    memory = torch.from_file(
        f"/proc/self/fd/{descriptor}", shared=True, size=MEMORY, dtype=torch.uint8
    )
    os.close(descriptor)
    return memory


class _Packer(pickle.Pickler):
    """Pickles a message, with its tensors copied to the shared memory."""

    def __init__(self, file: io.BytesIO, memory: Tensor) -> None:
        super().__init__(file)
        self.memory, self.used = memory, 0

    def persistent_id(self, item: Any) -> Any:
        """Return a reference to a tensor: first byte, type and shape."""
        if not isinstance(item, Tensor):
            return None
        reference = (self.used, item.dtype, item.shape)
        _at(self.memory, *reference).copy_(item.detach())
        self.used += -(-item.nbytes // ALIGNMENT) * ALIGNMENT
        return reference


class _Unpacker(pickle.Unpickler):
    """Unpickles a message, with its tensors left in the shared memory."""

    def __init__(self, file: io.BytesIO, memory: Tensor) -> None:
        super().__init__(file)
        self.memory = memory

    def persistent_load(self, reference: Any) -> Tensor:
        return _at(self.memory, *reference)


def _at(memory: Tensor, first: int, kind: torch.dtype, shape: torch.Size) -> Tensor:
    """Return the tensor that begins at byte ``first`` of the memory."""
    return memory[first : first + shape.numel() * kind.itemsize].view(kind).view(shape)


# ---------------------------------------------------------------- in the worker


def serve(channel: Connection, memory: Tensor) -> None:
    """Serve one session after another, until the other side of the channel is closed."""
    spare = SpareMemory()

    def receive() -> Any:
        return _Unpacker(io.BytesIO(channel.recv_bytes()), memory).load()

    with suppress(EOFError, ConnectionError):
        while True:
            decoder, arguments = receive()
            session = RaggedSession(network(decoder), spare, *arguments)
            while (message := receive()) is not None:
                channel.send_bytes(pickle.dumps(_answer(session, *message)))
            session.end_session()


def _answer(
    session: RaggedSession,
    threads: int,
    calls: Sequence[Sequence[Any]],
    requests: list[SamplingRequest],
) -> list[Sample] | Exception:
    """Make the calls, then sample; return the samples, or the exception with its traceback."""
    torch.set_num_threads(threads)
    try:
        for name, *arguments in calls:
            getattr(session, name)(*arguments)
        return session.sample(requests)
    except Exception as error:
        error.add_note(traceback.format_exc())
        return error


def main(channel: int, memory: int) -> None:
    """Run a worker; ``channel`` and ``memory`` are file descriptors."""
    serve(Connection(channel), _mapped(memory))

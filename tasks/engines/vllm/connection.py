"""The connection to vLLM in a process of its own on this machine (engine_process.py)."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from tasks.engines.turns import Drawn, EngineDiedError, TurnRequest
from tasks.engines.vllm.messages import ALIGNMENT, LOG, EngineFault, Opener, map_tensor
from tasks.policy import adapter

if TYPE_CHECKING:  # vLLM's processes run these files: imported for the ledger's keys alone
    from tasks.engines.vllm import engine_process, policy_worker  # noqa: F401

ROOT = Path(__file__).parents[3]  # of the project, where the process starts
END_WAIT = 10.0  # seconds for a process to end by itself
STALE_CACHE = "vLLM did not clear its prefix cache after the weight update"


class LocalVllm:
    """vLLM in a process of its own. Several threads may call its methods at the same time.

    Each raises EngineDiedError where vLLM has ended, and RuntimeError with vLLM's message where it
    refuses.
    """

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        """Start vLLM with the policy in ``folder``.

        Raises ValueError, in one line, where it cannot sample such a policy, and RuntimeError where
        it cannot start.
        """
        ours, theirs = socket.socketpair()
        LOG.parent.mkdir(parents=True, exist_ok=True)
        with theirs, LOG.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tasks.engines.vllm.engine_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=ENVIRONMENT | os.environ | {"PYTHONPATH": str(ROOT)},
                start_new_session=True,  # Ctrl-C at the terminal is for the trainer only
            )
        self.channel = Pipe(ours.detach())
        self.lock = threading.Lock()  # for the two below, and for sending
        self.waiting: dict[int, Future[Any]] = {}  # number of a call -> its answer to come
        self.calls = 0
        ready = self._expect(0)
        self.channel.send_bytes(pickle.dumps({"model": str(folder.absolute()), **options}))
        threading.Thread(target=self._listen, name="vllm", daemon=True).start()
        try:
            ready.result()
        except (RuntimeError, ValueError):
            self.close()
            raise

    def sample(self, turns: Sequence[TurnRequest]) -> list[Drawn]:
        """Sample turns; results are in their order."""
        return list(self.call("sample", *turns))

    def load(self, model: Any, folder: Callable[[], Path]) -> None:
        """Load weights from memory: those on the GPU in place, others through a shared copy.

        A policy with an adapter is loaded from the folder of merged weights: merging it in memory
        would take the space of a second policy.
        """
        free_gpu_memory()
        self.call("wake_up")
        if adapter.attached(model):
            self.call("worker", "load_folder", str(folder().absolute()))
        else:
            with shared(_weights(model)) as openers:
                self.call("worker", "load_shared", pickle.dumps(openers))
        if not self.call("reset_prefix_cache"):
            raise RuntimeError(STALE_CACHE)

    def release(self) -> None:
        """Release GPU memory until the next policy is loaded."""
        self.call("sleep", 2)

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.channel.close()

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of ``process.CALLS`` there, and wait for its result."""
        with self.lock:
            self.calls += 1
            number = self.calls
        answer = self._expect(number)
        with self.lock:
            try:
                self.channel.send_bytes(pickle.dumps((number, name, arguments)))
            except OSError:
                raise self._died() from None
        return answer.result()

    def _expect(self, number: int) -> Future[Any]:
        """Return the answer to come of a call."""
        answer: Future[Any] = Future()
        with self.lock:
            self.waiting[number] = answer
        return answer

    def _listen(self) -> None:
        """Give answers to their callers; when the channel closes, raise in all that wait."""
        with suppress(OSError, EOFError):
            while True:
                number, answer = pickle.loads(self.channel.recv_bytes())
                with self.lock:
                    waiting = self.waiting.pop(number)
                if isinstance(answer, EngineFault):
                    waiting.set_exception(EngineDiedError(f"vLLM has failed ({answer.reason})"))
                elif isinstance(answer, Exception):
                    waiting.set_exception(answer)
                else:
                    waiting.set_result(answer)
        with self.lock:
            left, self.waiting = list(self.waiting.values()), {}
        for waiting in left:
            waiting.set_exception(self._died())

    def _died(self) -> EngineDiedError:
        """Return the error for a process that has ended, with its exit status."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_WAIT)
        status = self.process.returncode
        return EngineDiedError(
            f"vLLM's process has ended (status {status}; -9: killed, often for a lack of memory; "
            f"its output is in {LOG})"
        )


ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # it already has a process of its own
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its sampler cannot measure entropies
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",  # a policy is a folder here
}


def free_gpu_memory() -> None:
    """Return GPU memory that this process has allocated and no longer uses to the driver."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def _weights(model: Any) -> dict[str, Tensor]:
    """Return weights by name; a tied one comes once."""
    return {name: weight.detach() for name, weight in model.named_parameters()}


@contextmanager
def shared(weights: dict[str, Tensor]) -> Iterator[dict[str, Opener]]:
    """Share weights with another process while the block lasts: yield how to open each.

    Weights on a GPU are opened in place; others are copied once, into memory that the other process
    opens through this one's entry in /proc.
    """
    here = {name: weight for name, weight in weights.items() if not weight.is_cuda}
    size = sum(_aligned_bytes(weight) for weight in here.values())
    memory = os.memfd_create("weights")
    try:
        os.truncate(memory, max(1, size))
        file, first = f"/proc/{os.getpid()}/fd/{memory}", 0
        openers: dict[str, Opener] = {
            name: reduce_tensor(weight) for name, weight in weights.items() if weight.is_cuda
        }
        for name, weight in here.items():
            arguments = (file, size, first, weight.dtype, weight.shape)
            map_tensor(*arguments).copy_(weight)
            openers[name] = (map_tensor, arguments)
            first += _aligned_bytes(weight)
        yield openers
    finally:
        os.close(memory)


def _aligned_bytes(weight: Tensor) -> int:
    return -(-weight.nbytes // ALIGNMENT) * ALIGNMENT

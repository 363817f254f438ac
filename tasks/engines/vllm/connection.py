"""How vLLM is reached: in a process of its own here, or on a server elsewhere."""

from __future__ import annotations

import gc
import http.client
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from tasks.engines.vllm.messages import ALIGNMENT, Drawn, Fault, Opener, Turn, mapped
from tasks.policy import adapter

if TYPE_CHECKING:  # what vLLM's processes run decides outcomes too: keys and dvc.yaml know it so
    from tasks.engines.vllm import (
        process,  # noqa: F401
        worker,  # noqa: F401  # noqa: F401
    )

ROOT = Path(__file__).parents[3]  # where the process finds the project
LOG = Path(".beamline/vllm.log")  # what the process of the last start has said
LEAVE = 10.0  # seconds that a process has to end by itself


KEPT = "vLLM keeps what it has computed with other weights, and does not let go of it"


class EngineDiedError(RuntimeError):
    """vLLM has gone while it was needed."""


class Connection(Protocol):
    """How vLLM is reached. Its methods may be called by several threads at one time.

    Each raises EngineDiedError where vLLM is gone, RuntimeError with its words where it refuses.
    """

    def sample(self, turns: Sequence[Turn]) -> list[Drawn]:
        """Sample some turns."""

    def take(self, model: Any, folder: Callable[[], Path]) -> None:
        """Put a policy in place: ``model`` as it is now, which lies in what ``folder`` returns."""

    def release(self) -> None:
        """Give the GPU's memory to the learner until the next policy is taken."""

    def close(self) -> None:
        """End it, where it is ours."""


# ---------------------------------------------------------------- in a process here


class LocalVllm:
    """vLLM in a process of its own on this machine (vllm_process.py)."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        """Start it with the policy in ``folder``. Raises RuntimeError where vLLM cannot start."""
        ours, theirs = socket.socketpair()
        LOG.parent.mkdir(parents=True, exist_ok=True)
        with theirs, LOG.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tasks.engines.vllm.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=ENVIRONMENT | os.environ | {"PYTHONPATH": str(ROOT)},
                start_new_session=True,  # an interrupt at the terminal is for the trainer
            )
        self.channel = Pipe(ours.detach())
        self.lock = threading.Lock()  # of the two below, and of sending
        self.waiting: dict[int, Future[Any]] = {}  # calls that have not been answered
        self.calls = 0
        ready = self._expect(0)
        self.channel.send_bytes(pickle.dumps({"model": str(folder.absolute()), **options}))
        threading.Thread(target=self._listen, name="vllm", daemon=True).start()
        try:
            ready.result()
        except RuntimeError:
            self.close()
            raise

    def sample(self, turns: Sequence[Turn]) -> list[Drawn]:
        return list(self._call("sample", *turns))

    def take(self, model: Any, folder: Callable[[], Path]) -> None:
        """From memory: a copy of the weights that both processes see, or the GPU's own.

        An adapter is taken from the folder that it was merged into: merged here, it would take the
        memory of a second policy.
        """
        give_back()
        self._call("wake_up")
        if adapter.attached(model):
            self._call("worker", "take_folder", str(folder().absolute()))
        else:
            with shared(_named(model)) as handed:
                self._call("worker", "take_memory", pickle.dumps(handed))
        if not self._call("reset_prefix_cache"):
            raise RuntimeError(KEPT)

    def release(self) -> None:
        self._call("sleep", 2)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.channel.close()

    def _call(self, name: str, *arguments: Any) -> Any:
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
        answer: Future[Any] = Future()
        with self.lock:
            self.waiting[number] = answer
        return answer

    def _listen(self) -> None:
        """Hand out answers as they come in; when no more can come, say so to all that wait."""
        with suppress(OSError, EOFError):
            while True:
                number, answer = pickle.loads(self.channel.recv_bytes())
                with self.lock:
                    waiting = self.waiting.pop(number)
                if isinstance(answer, Fault):
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
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LEAVE)
        status = self.process.returncode
        return EngineDiedError(
            f"vLLM's process has ended (status {status}; -9: killed, often for a lack of memory; "
            f"{LOG} has its words)"
        )


ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the process is one of its own already
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # whose sampler measures no entropies
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",  # policies are folders
}


def give_back() -> None:
    """Give memory of the GPU that this process has done with to whoever asks for it."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def _named(model: Any) -> dict[str, Tensor]:
    """Weights by name, a tied one once."""
    return {name: weight.detach() for name, weight in model.named_parameters()}


@contextmanager
def shared(weights: dict[str, Tensor]) -> Iterator[dict[str, Opener]]:
    """How another process opens these weights while the block lasts: none go through a pipe.

    Those on a GPU are opened where they are; others are copied once, into memory that this process
    holds and the other one finds by this one's number.
    """
    here = {name: weight for name, weight in weights.items() if not weight.is_cuda}
    size = sum(_room(weight) for weight in here.values())
    memory = os.memfd_create("weights")
    try:
        os.truncate(memory, max(1, size))
        file, first = f"/proc/{os.getpid()}/fd/{memory}", 0
        found: dict[str, Opener] = {
            name: reduce_tensor(weight) for name, weight in weights.items() if weight.is_cuda
        }
        for name, weight in here.items():
            place = (file, size, first, weight.dtype, weight.shape)
            mapped(*place).copy_(weight)
            found[name] = (mapped, place)
            first += _room(weight)
        yield found
    finally:
        os.close(memory)


def _room(weight: Tensor) -> int:
    return -(-weight.nbytes // ALIGNMENT) * ALIGNMENT


# ---------------------------------------------------------------- on a server


class RemoteVllm:
    """vLLM's own server, with Beamline's worker in it, at an address; see docs/vllm.md."""

    def __init__(self, address: str) -> None:
        """Raises EngineDiedError where nobody answers, ValueError for a server of another kind."""
        self.name, self.address = address, urlsplit(address)
        self.folder, self.closed = "", False
        self.connections = threading.local()
        self.pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="vllm")
        try:
            self._worker("measure_entropies")
        except EngineDiedError:
            raise
        except RuntimeError as error:
            raise ValueError(
                f"engine.server {address} is no vLLM that Beamline can train with: start it with "
                f"`make serve` ({error})"
            ) from None

    def sample(self, turns: Sequence[Turn]) -> list[Drawn]:
        """A server that was started anew since the policy was taken counts as gone."""
        if self.closed or self._worker("policy")["results"] != [self.folder]:
            raise EngineDiedError(f"engine.server {self.name} does not hold the policy any more")
        return list(self.pool.map(self._turn, turns))

    def take(self, model: Any, folder: Callable[[], Path]) -> None:
        """From the folder, which has to be the same one there."""
        self.folder = str(folder().absolute())
        self._worker("take_folder", self.folder)
        if not self._post("/reset_prefix_cache?reset_running_requests=true")["success"]:
            raise RuntimeError(f"engine.server {self.name}: {KEPT}")

    def release(self) -> None:
        """Nothing: its GPU is its own."""

    def close(self) -> None:
        self.closed = True  # turns under way go on, and are not waited for

    def _turn(self, turn: Turn) -> Drawn:
        options = turn.options() | {"flat_logprobs": False}
        answer = self._post(
            "/inference/v1/generate",
            {"token_ids": turn.tokens.tolist(), "sampling_params": options},
        )
        return read(answer["choices"][0])

    def _worker(self, method: str, *arguments: str) -> Any:
        return self._post("/collective_rpc", {"method": method, "args": arguments})

    def _post(self, path: str, body: Any = None) -> Any:
        """Raises EngineDiedError where nobody answers, RuntimeError for a refusal."""
        status, text = self._asked(path, json.dumps(body or {}))
        if status != http.client.OK:
            raise RuntimeError(f"{path}: {status} {text.decode(errors='replace')[:500]}")
        return json.loads(text) if text else None

    def _asked(self, path: str, body: str) -> tuple[int, bytes]:
        """Status and text of an answer. A connection that was closed while idle is made anew."""
        kept = hasattr(self.connections, "own")  # and may have been closed while nobody asked
        try:
            connection = self._connection()
            connection.request("POST", path, body, JSON)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            vars(self.connections).pop("own", None)
            if kept:
                return self._asked(path, body)
            raise EngineDiedError(f"engine.server {self.name}: {error}") from None

    def _connection(self) -> http.client.HTTPConnection:
        """This thread's own, which is kept."""
        if not hasattr(self.connections, "own"):
            kind = CONNECTIONS[self.address.scheme]
            opened = kind(self.address.netloc, timeout=ANSWER)
            opened.connect()
            for option, value in ALIVE.items():  # a machine without power says no good-bye
                opened.sock.setsockopt(*option, value)
            self.connections.own = opened
        own: http.client.HTTPConnection = self.connections.own
        return own


AT_ONCE = 256  # turns that are sent to a server side by side
ANSWER = 3600.0  # seconds that a turn may take there
ALIVE = {  # asked after so many idle seconds, so often, at such intervals
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 30,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 10,
}
JSON = {"Content-Type": "application/json"}
CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


def read(choice: dict[str, Any]) -> Drawn:
    """A turn as the server tells it."""
    content = choice["logprobs"]["content"]
    entropies = [entry["top_logprobs"][1]["logprob"] for entry in content]
    return (
        np.array(choice["token_ids"], np.int32),
        np.array([entry["logprob"] for entry in content], np.float32),
        np.array(entropies, np.float32),
    )

"""The connection to one server that samples, of either kind of engine; see docs/vllm.md."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tasks.engines.servers.token_guard import GENERATE, RPC, TOKEN, TOKEN_FILE
from tasks.engines.servers.uploads import CHANGED_HEADER, POLICIES, VERSION_HEADER, files_of
from tasks.engines.turns import Drawn, EngineDiedError, TurnRequest
from tasks.engines.vllm_options import sampling_options

TRANSFER = "BEAMLINE_TRANSFER"  # environment variable: how weights get to a server
PARALLEL_REQUESTS = 256  # requests for turns that a server gets at the same time
CONNECT_TIMEOUT = 10.0  # seconds for a server to take a connection
TURN_TIMEOUT = 3600.0  # seconds for a turn on the server
BLOCK = 2**20  # bytes of a file that are read and sent at once
KEEPALIVE = {  # probe after 30 idle seconds, 3 times, every 10 seconds
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 30,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 10,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
}
JSON = {"Content-Type": "application/json"}
CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
Answer = tuple[int, bytes, str]  # status, content, and the version of the weights


@dataclass(frozen=True)
class ServerCalls:
    """How servers of a kind of engine are asked."""

    check: str  # a method of their worker that servers of other kinds do not have
    batches: Callable[
        [Sequence[TurnRequest]], list[list[int]]
    ]  # indices of the turns of each request
    body: Callable[[Sequence[TurnRequest]], dict[str, Any]]  # of one request
    transfers: tuple[str, ...]  # how weights can get there, the default first


def _each(turns: Sequence[TurnRequest]) -> list[list[int]]:
    return [[index] for index in range(len(turns))]


def _by_tree(turns: Sequence[TurnRequest]) -> list[list[int]]:
    trees: dict[bytes, list[int]] = {}
    for index, turn in enumerate(turns):
        trees.setdefault(turn.tree, []).append(index)
    return list(trees.values())


def _for_vllm(turns: Sequence[TurnRequest]) -> dict[str, Any]:
    [turn] = turns
    options = sampling_options(turn) | {"flat_logprobs": False}
    return {"token_ids": turn.tokens.tolist(), "sampling_params": options}


def _for_transformers(turns: Sequence[TurnRequest]) -> dict[str, Any]:
    """Return a request; options are the same for all turns of a session."""
    first = turns[0]
    return {
        "temperature": first.temperature,
        "top_p": first.top_p,
        "stop": first.stop,
        "turns": [
            {"token_ids": turn.tokens.tolist(), "seed": turn.seed, "max_tokens": turn.max_tokens}
            for turn in turns
        ],
    }


# Engine of the server -> how it is asked. What vLLM computes for a turn does not depend on others
# (on a CPU), and its server puts requests together. The last bits of a transformers batch depend on
# the batch, so it gets the turns of a tree together, and computes nothing else with them.
CALLS = {
    "vllm": ServerCalls("measure_entropies", _each, _for_vllm, ("files", "nccl")),
    "transformers": ServerCalls("sample_trees", _by_tree, _for_transformers, ("files",)),
}


def _transfer_to(kind: str) -> str:
    """Return how weights get to servers of a kind. Raises ValueError for a way that they lack."""
    ways = CALLS[kind].transfers
    way = os.environ.get(TRANSFER) or ways[0]
    if way not in ways:
        raise ValueError(
            f"{TRANSFER} is '{way}', and weights get to servers of engine.kind {kind} by "
            f"{' or '.join(ways)}: set it to that, or unset it"
        )
    return way


class StaleWeightsError(EngineDiedError):
    """A server has other weights than the run has given it; it may have started again."""


class EngineServer:
    """A server at an address. Several threads may call its methods at the same time.

    Each raises EngineDiedError where no answer comes, RuntimeError with the server's message where
    it refuses, and ValueError where it does not know this run's token.
    """

    def __init__(self, address: str, kind: str) -> None:
        """Make ready to connect.

        ``kind``: the engine that samples there, one of ``CALLS``. Raises ValueError for an address
        with a password, and where weights cannot get there as BEAMLINE_TRANSFER says.
        """
        self.name, self.address = address, urlsplit(address)
        self.kind, self.calls = kind, CALLS[kind]
        self.transfer = _transfer_to(kind)
        if "@" in self.address.netloc:
            raise ValueError(
                "engine.servers has a user or a password, and git and MLflow keep the recipe: name "
                f"the server without it, and give its token in {TOKEN}"
            )
        self.headers = {"Authorization": f"Bearer {os.environ.get(TOKEN, '').strip()}"}
        self.connections = threading.local()
        self.pool = ThreadPoolExecutor(PARALLEL_REQUESTS, thread_name_prefix="server")

    def sample(self, turns: Sequence[TurnRequest], version: str) -> list[Drawn | EngineDiedError]:
        """Sample turns with the weights ``version``; results in their order.

        A turn that has no answer, or one by other weights, has the error as its result.
        """
        batches = self.calls.batches(turns)
        requests = [[turns[index] for index in indices] for indices in batches]
        results: dict[int, Drawn | EngineDiedError] = {}
        answers = self.pool.map(lambda batch: self._batch(batch, version), requests)
        for indices, drawn in zip(batches, answers, strict=True):
            results.update(zip(indices, drawn, strict=True))
        return [results[index] for index in range(len(turns))]

    def load(self, folder: Path, version: str) -> None:
        """Load the weights of a folder; its files are sent where the server does not see them.

        No turn is sampled meanwhile, and nothing that other weights have computed is left. Raises
        ValueError for a server of another kind.
        """
        self.check()
        load = self._loading(folder, version)
        self._post("/pause?mode=keep")
        try:
            load()
            if not self._post("/reset_prefix_cache?reset_running_requests=true")["success"]:
                raise RuntimeError(
                    f"engine.servers: {self.name} did not clear its prefix cache after the weight "
                    "update: start it again"
                )
        finally:
            self._post("/resume")

    def _loading(self, folder: Path, version: str) -> Callable[[], object]:
        """Return what gives the weights to the server once it is paused."""
        return {"files": self._by_files, "nccl": self._by_nccl}[self.transfer](folder, version)

    def _by_files(self, folder: Path, version: str) -> Callable[[], object]:
        return partial(self._worker, "load_folder", self._place(folder, version), version)

    def _by_nccl(self, folder: Path, version: str) -> Callable[[], object]:
        return partial(self._send, folder, version)

    def _send(self, folder: Path, version: str) -> None:
        """Send the weights to the server's GPUs; only then does it take their version."""
        from tasks.engines.servers import nccl_transfer  # imports vLLM

        nccl_transfer.send(self._post, len(self._worker("policy")["results"]), folder)
        self._worker("name_policy", version)

    def check(self) -> None:
        """Raise ValueError where another kind of server answers."""
        try:
            self._worker(self.calls.check)
        except EngineDiedError:
            raise
        except RuntimeError as error:
            raise ValueError(
                f"engine.servers: {self.name} is no server of engine.kind {self.kind} that "
                f"Beamline can train with: start it with `make serve` ({error})"
            ) from None

    def weight_digest(self, name: str) -> str:
        """Return the digest of one of the weights that the server holds, by its name."""
        return str(self._worker("weight_digest", name)["results"][0])

    def _place(self, folder: Path, version: str) -> str:
        """Return the server's folder of the policy, after sending what is missing there."""
        files = files_of(folder)
        described = {"folder": str(folder), "files": files, "version": version}
        for name in self._post(POLICIES, described)["missing"]:
            headers = {
                "Content-Length": str(files[name][0]),
                CHANGED_HEADER: str(files[name][1]),
                VERSION_HEADER: version,
            }
            self._asked("PUT", f"{POLICIES}/{name}", folder / name, headers)
        remote_folder: str | None = self._post(POLICIES, described)["folder"]
        if remote_folder is None:
            raise RuntimeError(
                f"engine.servers: {self.name} has not got all files of {folder}: do two runs use "
                "it, or does something write there?"
            )
        return remote_folder

    def _batch(
        self, turns: Sequence[TurnRequest], version: str
    ) -> Sequence[Drawn | EngineDiedError]:
        """Sample the turns of one request."""
        body = json.dumps(self.calls.body(turns)).encode()
        try:
            answer, answered_version = self._asked("POST", GENERATE, body, JSON)
        except EngineDiedError as error:
            return [error] * len(turns)
        if answered_version != version:
            stale = StaleWeightsError(
                f"engine.servers: {self.name} answered with the weights "
                f"'{answered_version}' instead of '{version}'"
            )
            return [stale] * len(turns)
        return [parse_choice(choice) for choice in answer["choices"]]

    def _worker(self, method: str, *arguments: str) -> Any:
        """Call a method of the server's worker."""
        return self._post(RPC, {"method": method, "args": arguments})

    def _post(self, path: str, body: Any = None) -> Any:
        return self._asked("POST", path, json.dumps(body or {}).encode(), JSON)[0]

    def _asked(
        self, method: str, path: str, body: bytes | Path, headers: Mapping[str, str]
    ) -> tuple[Any, str]:
        """Return the answer, and the version of the weights that gave it."""
        status, text, version = self._request(method, path, body, headers)
        if status == http.client.UNAUTHORIZED:
            raise ValueError(
                f"engine.servers: {self.name} refuses this run: set {TOKEN} to the server's token, "
                f"which `make serve` keeps in {TOKEN_FILE}, and call it by a name that it has "
                "(--name)"
            )
        if status != http.client.OK:
            raise RuntimeError(f"{path}: {status} {text.decode(errors='replace')[:500]}")
        return json.loads(text) if text else None, version

    def _request(
        self, method: str, path: str, body: bytes | Path, headers: Mapping[str, str]
    ) -> Answer:
        """Return the answer; retry once on a connection closed while idle."""
        reused = hasattr(self.connections, "own")
        with body.open("rb") if isinstance(body, Path) else nullcontext(body) as content:
            try:
                connection = self._connection()
                connection.request(method, path, content, {**self.headers, **headers})
                answer = connection.getresponse()
                return answer.status, answer.read(), answer.headers.get(VERSION_HEADER, "")
            except (OSError, http.client.HTTPException) as error:
                vars(self.connections).pop("own", None)
                if not reused:
                    raise EngineDiedError(f"engine.servers: {self.name}: {error}") from None
        return self._request(method, path, body, headers)

    def _connection(self) -> http.client.HTTPConnection:
        """Return this thread's connection, opened at its first call."""
        if not hasattr(self.connections, "own"):
            kind = CONNECTIONS[self.address.scheme]
            opened = kind(self.address.netloc, timeout=CONNECT_TIMEOUT, blocksize=BLOCK)
            opened.connect()
            opened.sock.settimeout(TURN_TIMEOUT)
            for option, value in KEEPALIVE.items():  # notices a machine that lost power
                opened.sock.setsockopt(*option, value)
            self.connections.own = opened
        connection: http.client.HTTPConnection = self.connections.own
        return connection


def parse_choice(choice: dict[str, Any]) -> Drawn:
    """Return tokens, logprobs and entropies [T] of a turn in the server's answer."""
    content = choice["logprobs"]["content"]
    entropies = [entry["top_logprobs"][1]["logprob"] for entry in content]
    return (
        np.array(choice["token_ids"], np.int32),
        np.array([entry["logprob"] for entry in content], np.float32),
        np.array(entropies, np.float32),
    )

"""One of vLLM's own servers, with Beamline's worker in it (serve.py); see docs/vllm.md."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tasks.engines.vllm.connection import STALE_CACHE, EngineDiedError
from tasks.engines.vllm.guard import POLICY_HEADER, TOKEN, TOKEN_FILE
from tasks.engines.vllm.messages import Drawn, Turn

PARALLEL_TURNS = 256  # turns that a server gets at the same time
CONNECT_TIMEOUT = 10.0  # seconds for a server to take a connection
TURN_TIMEOUT = 3600.0  # seconds for a turn on the server
KEEPALIVE = {  # probe after 30 idle seconds, 3 times, every 10 seconds
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 30,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 10,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
}
JSON = {"Content-Type": "application/json"}
CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
Answer = tuple[int, bytes, str]  # status, content, and the version of the weights


class StaleWeightsError(EngineDiedError):
    """A server has other weights than the run has given it; it may have started again."""


class Server:
    """A server at an address. Several threads may call its methods at the same time.

    Each raises EngineDiedError where no answer comes, RuntimeError with vLLM's message where it
    refuses, and ValueError where it does not know this run's token.
    """

    def __init__(self, address: str) -> None:
        """Make ready to connect. Raises ValueError for an address with a password."""
        self.name, self.address = address, urlsplit(address)
        if "@" in self.address.netloc:
            raise ValueError(
                "engine.servers has a user or a password, and git and MLflow keep the recipe: name "
                f"the server without it, and give its token in {TOKEN}"
            )
        self.headers = JSON | {"Authorization": f"Bearer {os.environ.get(TOKEN, '').strip()}"}
        self.connections = threading.local()
        self.pool = ThreadPoolExecutor(PARALLEL_TURNS, thread_name_prefix="vllm")

    def sample(self, turns: Sequence[Turn], version: str) -> list[Drawn | EngineDiedError]:
        """Sample turns, each for itself, with the weights ``version``; results in their order.

        A turn that has no answer, or one by other weights, has the error as its result.
        """
        return list(self.pool.map(lambda turn: self._turn(turn, version), turns))

    def load(self, folder: str, version: str) -> None:
        """Load the weights of a folder, which must have the same path on the server.

        No turn is sampled meanwhile, and nothing that other weights have computed is left. Raises
        ValueError for a server of another kind.
        """
        try:
            self._worker("measure_entropies")
        except EngineDiedError:
            raise
        except RuntimeError as error:
            raise ValueError(
                f"engine.servers: {self.name} is no vLLM that Beamline can train with: start it "
                f"with `make serve` ({error})"
            ) from None
        self._post("/pause?mode=keep")
        try:
            self._worker("load_folder", folder, version)
            if not self._post("/reset_prefix_cache?reset_running_requests=true")["success"]:
                raise RuntimeError(f"engine.servers: {self.name}: {STALE_CACHE}")
        finally:
            self._post("/resume")

    def _turn(self, turn: Turn, version: str) -> Drawn | EngineDiedError:
        options = turn.options() | {"flat_logprobs": False}
        body = {"token_ids": turn.tokens.tolist(), "sampling_params": options}
        try:
            answer, own = self._asked("/inference/v1/generate", body)
        except EngineDiedError as error:
            return error
        if own != version:
            return StaleWeightsError(
                f"engine.servers: {self.name} answered with the weights '{own}' instead of "
                f"'{version}'"
            )
        return parse_choice(answer["choices"][0])

    def _worker(self, method: str, *arguments: str) -> Any:
        """Call a method of ``PolicyWorker`` on the server."""
        return self._post("/collective_rpc", {"method": method, "args": arguments})

    def _post(self, path: str, body: Any = None) -> Any:
        return self._asked(path, body)[0]

    def _asked(self, path: str, body: Any) -> tuple[Any, str]:
        """Return the answer, and the version of the weights that gave it."""
        status, text, version = self._request(path, json.dumps(body or {}))
        if status == http.client.UNAUTHORIZED:
            raise ValueError(
                f"engine.servers: {self.name} refuses this run: set {TOKEN} to the server's token, "
                f"which `make serve` keeps in {TOKEN_FILE}, and call it by a name that it has "
                "(--name)"
            )
        if status != http.client.OK:
            raise RuntimeError(f"{path}: {status} {text.decode(errors='replace')[:500]}")
        return json.loads(text) if text else None, version

    def _request(self, path: str, body: str) -> Answer:
        """Return the answer; retry once on a connection closed while idle."""
        reused = hasattr(self.connections, "own")
        try:
            connection = self._connection()
            connection.request("POST", path, body, self.headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers.get(POLICY_HEADER, "")
        except (OSError, http.client.HTTPException) as error:
            vars(self.connections).pop("own", None)
            if reused:
                return self._request(path, body)
            raise EngineDiedError(f"engine.servers: {self.name}: {error}") from None

    def _connection(self) -> http.client.HTTPConnection:
        """Return this thread's connection, opened at its first call."""
        if not hasattr(self.connections, "own"):
            kind = CONNECTIONS[self.address.scheme]
            opened = kind(self.address.netloc, timeout=CONNECT_TIMEOUT)
            opened.connect()
            opened.sock.settimeout(TURN_TIMEOUT)
            for option, value in KEEPALIVE.items():  # notices a machine that lost power
                opened.sock.setsockopt(*option, value)
            self.connections.own = opened
        own: http.client.HTTPConnection = self.connections.own
        return own


def parse_choice(choice: dict[str, Any]) -> Drawn:
    """Return tokens, logprobs and entropies [T] of a turn in the server's answer."""
    content = choice["logprobs"]["content"]
    entropies = [entry["top_logprobs"][1]["logprob"] for entry in content]
    return (
        np.array(choice["token_ids"], np.int32),
        np.array([entry["logprob"] for entry in content], np.float32),
        np.array(entropies, np.float32),
    )

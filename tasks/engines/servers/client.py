"""The connection to one server that samples, of either kind of engine; see docs/gpu.md."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tasks.engines.servers import answers, bounded_http
from tasks.engines.servers.bounded_http import HttpAnswer
from tasks.engines.servers.patience import PATIENCE, Patience, retry_after
from tasks.engines.servers.token_guard import GENERATE, RPC, TOKEN, TOKEN_FILE
from tasks.engines.servers.uploads import CHANGED_HEADER, POLICIES, VERSION_HEADER, files_of
from tasks.engines.turns import Drawn, EngineDiedError, TurnRequest
from tasks.engines.vllm_options import sampling_options
from tasks.trees.words import printable

if TYPE_CHECKING:
    from tasks.engines.servers.weights_check import ServedPolicy
    from tasks.policy.token_ids import TokenIds

TRANSFER = "BEAMLINE_TRANSFER"  # environment variable: how weights get to a server
PARALLEL_REQUESTS = 256  # requests for turns that a server gets at the same time
ANSWER_BYTES = 2**20  # of an answer, beside those of its tokens
TOKEN_BYTES = 2**12  # of a token: vLLM's take a tenth of it, and all of it for a long run of spaces
SHOWN = 500  # characters of what a server says
JSON = {"Content-Type": "application/json"}
REFUSED = (401, 403, 407)  # statuses where the run has no token that the server knows
NO_SUCH_CALL = (404, 405, 501)  # where the server lacks a call that ours have
UNFIT = (400, 413, 414, 415, 422, 431)  # where the request itself is at fault, to each server


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


class ServerFailedError(EngineDiedError):
    """A server gives no answer, or none that can be right. It may give one later."""

    def __init__(self, server: str, reason: str, status: int = 0, pause: float = 0.0) -> None:
        """``reason``: with the remedy; ``pause``: seconds that the server asks to wait for."""
        super().__init__(f"engine.servers: {server}: {reason}")
        self.status, self.pause = status, pause


class StaleWeightsError(ServerFailedError):
    """A server has other weights than the run has given it; it may have started again."""


class UnfitRequestError(RuntimeError):
    """A server refuses a request that others would refuse, too."""


Failure = ServerFailedError | UnfitRequestError | ValueError  # of a server


class EngineServer:
    """A server at an address. Several threads may call its methods at the same time.

    Each raises ServerFailedError where no answer comes in time, or one that cannot be right,
    UnfitRequestError with the server's message where it refuses, and ValueError where it does not
    know this run's token.
    """

    def __init__(self, address: str, kind: str, patience: Patience = PATIENCE) -> None:
        """Make ready to connect.

        ``kind``: the engine that samples there, one of ``CALLS``. Raises ValueError for an address
        with a password, and where weights cannot get there as BEAMLINE_TRANSFER says.
        """
        self.name, self.address = address, urlsplit(address)
        self.kind, self.calls = kind, CALLS[kind]
        self.transfer, self.patience = _transfer_to(kind), patience
        if "@" in self.address.netloc:
            raise ValueError(
                "engine.servers has a user or a password, and git and MLflow keep the recipe: name "
                f"the server without it, and give its token in {TOKEN}"
            )
        self.headers = {"Authorization": f"Bearer {os.environ.get(TOKEN, '').strip()}"}
        self.connections = threading.local()
        self.pool = ThreadPoolExecutor(PARALLEL_REQUESTS, thread_name_prefix="server")
        self.answered = 0.0  # time.monotonic() of the last answer to a request for turns

    def sample(
        self, turns: Sequence[TurnRequest], version: str, ids: TokenIds, pieces: Sequence[str]
    ) -> list[Drawn | Failure]:
        """Sample turns with the weights ``version``; results in their order.

        A turn that has no answer, or one by other weights, has the error as its result.
        """
        batches = self.calls.batches(turns)
        failures: list[Failure] = []  # after the first one, no further request is begun

        def answer(indices: Sequence[int]) -> Sequence[Drawn | Failure]:
            batch = [turns[index] for index in indices]
            try:
                if not failures:
                    return self._batch(batch, version, ids, pieces)
            except (ServerFailedError, UnfitRequestError, ValueError) as error:
                failures.append(error)
            return failures[:1] * len(batch)

        results: dict[int, Drawn | Failure] = {}
        for indices, drawn in zip(batches, self.pool.map(answer, batches), strict=True):
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
            cleared = self._post("/reset_prefix_cache?reset_running_requests=true")
            if not (isinstance(cleared, dict) and cleared.get("success") is True):
                raise self._failed(
                    "it did not clear its prefix cache after the weight update: start it again"
                )
        finally:
            self._post("/resume")

    def _loading(self, folder: Path, version: str) -> Callable[[], object]:
        """Return what gives the weights to the server once it is paused."""
        seconds = self.patience.of_weights(sum(size for size, _ in files_of(folder).values()))
        way = {"files": self._by_files, "nccl": self._by_nccl}[self.transfer]
        return way(folder, version, seconds)

    def _by_files(self, folder: Path, version: str, seconds: float) -> Callable[[], object]:
        place = self._place(folder, version)
        return partial(self._worker, "load_folder", place, version, seconds=seconds)

    def _by_nccl(self, folder: Path, version: str, seconds: float) -> Callable[[], object]:
        return partial(self._send, folder, version, seconds)

    def _send(self, folder: Path, version: str, seconds: float) -> None:
        """Send the weights to the server's GPUs; only then does it take their version."""
        from tasks.engines.servers import nccl_transfer  # imports vLLM

        ask = partial(self._post, seconds=seconds)
        nccl_transfer.send(ask, len(self._worker("policy")), folder)
        self._worker("name_policy", version)

    def check_weights(self, policy: ServedPolicy) -> None:
        """Raise StaleWeightsError where the server has other weights than those of a policy.

        From now on it draws no ids but those that have a token. Raises ValueError for a server that
        cannot leave out others.
        """
        from tasks.engines.servers.weights_check import difference, turns_after_prompt

        def drawn() -> list[Drawn]:
            turns = turns_after_prompt(policy.ids.end)
            batches = [[turns[index] for index in batch] for batch in self.calls.batches(turns)]
            how = policy.version, policy.ids, policy.pieces
            return [turn for batch in batches for turn in self._batch(batch, *how)]

        held = self._told("policy")
        if held != policy.version:
            raise self._stale(held, policy.version)
        self._leave_out(policy)
        if other := difference(policy.reference, self.weight_digest, drawn):
            raise StaleWeightsError(
                self.name,
                f"it says that it has the weights '{policy.version}' and has others: {other}: "
                "start it again",
            )

    def _leave_out(self, policy: ServedPolicy) -> None:
        """Have the server draw no id of its policy that has no token."""
        told = policy.ids.told()
        try:
            drawn = self._told("draw_from", told, policy.version)
        except (ServerFailedError, UnfitRequestError) as error:
            if getattr(error, "status", 500) not in (*NO_SUCH_CALL, 500):
                raise
            raise ValueError(
                f"engine.servers: {self.name} cannot leave out ids that the tokenizer has not: "
                f"start it again with `make serve` of this version of Beamline ({error})"
            ) from None
        if drawn != told:
            raise self._stale(self._told("policy"), policy.version)

    def check(self) -> None:
        """Raise ValueError where another kind of server answers."""
        try:
            self._worker(self.calls.check)
        except (ServerFailedError, UnfitRequestError) as error:
            status = getattr(error, "status", NO_SUCH_CALL[0])
            if status in NO_SUCH_CALL or (status == 500 and self._has_policy()):
                raise ValueError(
                    f"engine.servers: {self.name} is no server of engine.kind {self.kind} that "
                    f"Beamline can train with: start it with `make serve` ({error})"
                ) from None
            raise

    def _has_policy(self) -> bool:
        """Return whether it knows a call that servers of both kinds have."""
        with suppress(ServerFailedError, UnfitRequestError):
            return bool(self._worker("policy"))
        return False

    def weight_digest(self, name: str) -> str:
        """Return the digest of one of the weights that the server holds, by its name."""
        return self._told("weight_digest", name)

    def _place(self, folder: Path, version: str) -> str:
        """Return the server's folder of the policy, after sending what is missing there."""
        files = files_of(folder)
        described = {"folder": str(folder), "files": files, "version": version}
        for name in self._missing(self._post(POLICIES, described), files):
            headers = {
                "Content-Length": str(files[name][0]),
                CHANGED_HEADER: str(files[name][1]),
                VERSION_HEADER: version,
            }
            seconds = self.patience.of_weights(files[name][0])
            self._asked("PUT", f"{POLICIES}/{name}", folder / name, headers, seconds)
        answer = self._post(POLICIES, described)
        self._missing(answer, files)
        remote_folder = answer.get("folder")
        if not isinstance(remote_folder, str):
            raise self._failed(
                f"it has not got all files of {folder}: do two runs use it, or does something "
                "write there?"
            )
        return remote_folder

    def _missing(self, answer: Any, files: Mapping[str, object]) -> list[str]:
        """Return the files that a server lacks, of those that it was told of."""
        missing = answer.get("missing") if isinstance(answer, dict) else None
        if not isinstance(missing, list) or not all(
            isinstance(name, str) and name in files for name in missing
        ):
            raise self._failed(f"{POLICIES}: it does not say which files it lacks")
        return missing

    def _batch(
        self, turns: Sequence[TurnRequest], version: str, ids: TokenIds, pieces: Sequence[str]
    ) -> list[Drawn]:
        """Sample the turns of one request."""
        begun, patience = time.monotonic(), self.patience
        silence = patience.turn + patience.token * max(turn.max_tokens for turn in turns)
        reply = self._request(
            "POST",
            GENERATE,
            json.dumps(self.calls.body(turns)).encode(),
            JSON,
            lambda: min(begun + patience.longest_turn, max(begun, self.answered) + silence),
            ANSWER_BYTES + TOKEN_BYTES * sum(turn.max_tokens for turn in turns),
        )
        answer = self._parsed(GENERATE, reply)
        answered_version = reply.headers.get(VERSION_HEADER, "")
        if answered_version != version:
            raise self._stale(answered_version, version)
        if wrong := answers.fault(answer, turns, ids, pieces):
            raise self._failed(f"{GENERATE}: a wrong answer: {wrong}")
        self.answered = time.monotonic()
        return [answers.parse_choice(choice) for choice in answer["choices"]]

    def _worker(self, method: str, *arguments: str, seconds: float | None = None) -> list[Any]:
        """Call a method of the server's worker; return what each of its processes returns."""
        answer = self._post(RPC, {"method": method, "args": arguments}, seconds)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise self._failed(f"{RPC}: a wrong answer to {method}: no list of results")
        return results

    def _told(self, method: str, *arguments: str) -> str:
        """Return what the worker's first process tells."""
        results = self._worker(method, *arguments)
        if not results or not isinstance(results[0], str):
            raise self._failed(f"{RPC}: a wrong answer to {method}: no text")
        return results[0]

    def _post(self, path: str, body: Any = None, seconds: float | None = None) -> Any:
        return self._asked("POST", path, json.dumps(body or {}).encode(), JSON, seconds)[0]

    def _asked(
        self,
        method: str,
        path: str,
        body: bytes | Path,
        headers: Mapping[str, str],
        seconds: float | None = None,
    ) -> tuple[Any, str]:
        """Return the answer, and the version of the weights that gave it."""
        ends = time.monotonic() + (self.patience.call if seconds is None else seconds)
        reply = self._request(method, path, body, headers, lambda: ends, ANSWER_BYTES)
        return self._parsed(path, reply), reply.headers.get(VERSION_HEADER, "")

    def _parsed(self, path: str, reply: HttpAnswer) -> Any:
        """Return the content of an answer, None for an empty one; raise for other answers."""
        said = _words(reply.content)
        if reply.status in REFUSED:
            raise ValueError(
                f"engine.servers: {self.name} refuses this run: set {TOKEN} to the server's token, "
                f"which `make serve` keeps in {TOKEN_FILE}, and call it by a name that it has "
                f"(--name) ({reply.status} {said})"
            )
        if reply.status in UNFIT:
            raise UnfitRequestError(
                f"engine.servers: {self.name} refuses a request: {path}: {reply.status} {said}: "
                "start it with the options that the recipe needs, such as --context"
            )
        if reply.status != http.client.OK:
            location = _words(reply.headers.get("Location", "").encode())
            moved = f" to {location}, where the run does not follow" if location else ""
            pause = retry_after(reply.headers.get("Retry-After", ""))
            reason = f"{path}: {reply.status}{moved} {said}".rstrip()
            raise self._failed(reason, reply.status, pause)
        try:
            return json.loads(reply.content) if reply.content else None
        except (ValueError, RecursionError) as error:
            why = "too deep" if isinstance(error, RecursionError) else "no JSON"
            raise self._failed(f"{path}: an answer that is {why}: {said[:80]}") from None

    def _failed(self, reason: str, status: int = 0, pause: float = 0.0) -> ServerFailedError:
        return ServerFailedError(self.name, reason, status, pause)

    def _stale(self, given: str, version: str) -> StaleWeightsError:
        held = _words(given.encode())
        reason = f"it answered with the weights '{held}' instead of '{version}'"
        return StaleWeightsError(self.name, reason)

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | Path,
        headers: Mapping[str, str],
        ends: Callable[[], float],
        limit: int,
    ) -> HttpAnswer:
        """Return the answer; retry once on a connection closed while idle."""
        reused = hasattr(self.connections, "own")
        with body.open("rb") if isinstance(body, Path) else nullcontext(body) as content:
            try:
                if not reused:
                    self.connections.own = bounded_http.connect(self.address)
                together = {**self.headers, **headers}
                whole = self.address.path.rstrip("/") + path  # a proxy may have several servers
                return bounded_http.ask(
                    self.connections.own, method, whole, content, together, ends, limit
                )
            except (OSError, http.client.HTTPException, UnicodeError) as error:
                if hasattr(self.connections, "own"):
                    vars(self.connections).pop("own").close()
                if not (reused and isinstance(error, ConnectionError)):
                    raise self._failed(_words(f"{path}: {error!s}".encode())) from None
        return self._request(method, path, body, headers, ends, limit)


def _words(said: bytes) -> str:
    """Return the beginning of what a server says in one printable line."""
    words = " ".join(said[: 4 * SHOWN].decode(errors="replace").split())
    return printable(words[:SHOWN])[:SHOWN]

"""The address at which programs ask for their answers, in OpenAI's protocol.

It listens on this machine's loopback and on a Unix socket, which sandboxes reach. The key of a
request names its episode, and is refused once that has ended. Answers are sampled elsewhere
(program_rollout.py); this thread only reads, waits and writes.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import takewhile
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tasks.programs import answering, relay, responses_api
from tasks.programs.asking import Asked, FixedSampling, read
from tasks.programs.episodes import ProgramEpisode, SampledAnswer
from tasks.programs.launching import SOCKET
from tasks.programs.messages import RefusedError, digest
from tasks.programs.request_queue import RequestQueue, WaitingRequest

MODEL = "policy"
MOST_BYTES = 2**23  # of a request
MOST_CONNECTIONS = 4096
START_SECONDS = 30.0


class KeyHolder:
    """An episode as the gateway knows it: its requests by what they say."""

    def __init__(self, episode: ProgramEpisode) -> None:
        self.episode = episode
        self.requests: dict[str, WaitingRequest] = {}  # the newest of equal ones


class Gateway:
    """The server, in a thread of its own."""

    def __init__(
        self,
        queue: RequestQueue,
        sampling: FixedSampling,
        sockets: Path,
        listen: str,
        port: int = 0,
    ) -> None:
        relay.allow_connections()
        self.queue, self.sampling = queue, sampling
        self.callers: dict[str, list[KeyHolder]] = {}  # by key
        self.keys: dict[int, str] = {}  # by id of the episode
        self.path = sockets / SOCKET
        self.tcp = socket.socket(socket.AF_INET6 if ":" in listen else socket.AF_INET)
        self.tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.tcp.bind((listen, port))
        self.unix = socket.socket(socket.AF_UNIX)
        self.path.unlink(missing_ok=True)
        self.unix.bind(str(self.path))
        self.path.chmod(0o666)
        config = uvicorn.Config(
            self._app(),
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=60,
            limit_concurrency=MOST_CONNECTIONS,
        )
        self.server = uvicorn.Server(config)
        self.server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self.begun: Future[None] = Future()
        self.thread = threading.Thread(target=self._run, daemon=True)

    @property
    def port(self) -> int:
        """Return the port of the loopback."""
        return int(self.tcp.getsockname()[1])

    def __enter__(self) -> Gateway:
        self.thread.start()
        self.begun.result(timeout=START_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.server.force_exit = True
        self.thread.join(timeout=10)
        self.tcp.close()
        self.unix.close()

    def _run(self) -> None:
        async def serve() -> None:
            for listening in (self.tcp, self.unix):
                listening.listen(MOST_CONNECTIONS)
                listening.setblocking(False)
            self.begun.set_result(None)
            await self.server.serve(sockets=[self.tcp, self.unix])

        asyncio.run(serve())

    # ------------------------------------------------------------ episodes

    def endpoint(self, episode: ProgramEpisode, address: str, seconds: float) -> dict[str, Any]:
        """Return what the program of an episode is told of the gateway; its key is its own."""
        key = f"bl-{secrets.token_urlsafe(24)}"
        self.callers[key] = [KeyHolder(episode)]
        self.keys[id(episode)] = key
        return {
            "base_url": f"http://{address}/v1",
            "key": key,
            "model": MODEL,
            "seconds": seconds,
        }

    def admit(self, key: str, episodes: Sequence[ProgramEpisode]) -> list[KeyHolder]:
        """Answer a key without an end, each conversation in one of these episodes; return them."""
        self.callers[key] = [KeyHolder(episode) for episode in episodes]
        return self.callers[key]

    def forget(self, episode: ProgramEpisode) -> None:
        """Refuse the key of an episode from now on."""
        self.callers.pop(self.keys.pop(id(episode), ""), None)

    # ------------------------------------------------------------ requests

    def _app(self) -> Starlette:
        async def models(request: Request) -> Response:
            self._holders(request)
            shown = {"id": MODEL, "object": "model", "created": 0, "owned_by": "beamline"}
            return JSONResponse({"object": "list", "data": [shown]})

        async def model(request: Request) -> Response:
            self._holders(request)
            name = request.path_params["name"]
            shown = {"id": name, "object": "model", "created": 0, "owned_by": "beamline"}
            return JSONResponse(shown)

        async def chat(request: Request) -> Response:
            holders, body = self._holders(request), await _body(request)
            asked = read(body, self.sampling)
            answers = await self._answers(holders, body, asked, _retries(request))
            if asked.stream:
                return _streamed(answering.chunks(answers, asked, MODEL))
            return JSONResponse(answering.completion(answers, asked, MODEL))

        async def responses(request: Request) -> Response:
            holders, body = self._holders(request), await _body(request)
            asked = read(responses_api.as_chat(body), self.sampling)
            answers = await self._answers(holders, body, asked, _retries(request))
            written = responses_api.response(answers[0], body, MODEL)
            if body.get("stream") is True:
                return _streamed(responses_api.events(written), end=False)
            return JSONResponse(written)

        routes = [
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
        ]
        handlers: Mapping[Any, Any] = {
            RefusedError: _refused,
            ClientDisconnect: _gone,
            404: _unknown,
            Exception: _failed,
        }
        return Starlette(routes=routes, exception_handlers=handlers)

    def _holders(self, request: Request) -> list[KeyHolder]:
        """Return whose key a request has. Raises RefusedError for a key of no running episode."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        holders = self.callers.get(key.strip()) if scheme.lower() == "bearer" else None
        if holders is None:
            raise RefusedError("this key is of no episode that runs", 401, "invalid_api_key")
        return holders

    async def _answers(
        self, holders: Sequence[KeyHolder], body: Any, asked: Asked, retries: int
    ) -> list[SampledAnswer]:
        """Wait for the answers to a request; a retry gets those of the request that it repeats.

        A retry says so, or is equal to a request that is not answered yet.
        """
        asked_first = takewhile(lambda message: message.role != "assistant", asked.messages)
        begins = digest([message.content for message in asked_first])
        caller = holders[int(begins, 16) % len(holders)]
        text = digest(json.dumps(body, sort_keys=True))
        earlier = caller.requests.get(text)
        if earlier is not None and (retries or not earlier.answered.done()):
            return await earlier.answers()
        request = WaitingRequest(caller.episode, asked)
        self.queue.put(request)
        caller.requests[text] = request
        return await request.answers()


def _retries(request: Request) -> int:
    given = request.headers.get("x-stainless-retry-count", "0")
    return int(given) if given.isdecimal() else 0


async def _body(request: Request) -> Any:
    """Read a body of JSON. Raises RefusedError for a longer one than is taken."""
    held = bytearray()
    async for chunk in request.stream():
        held += chunk
        if len(held) > MOST_BYTES:
            raise RefusedError(f"the request has over {MOST_BYTES} bytes", 413, "too_large")
    try:
        return json.loads(held)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body is no JSON: {error}") from None


def _streamed(pieces: list[dict[str, Any]], end: bool = True) -> Response:
    """Return server-sent events; ``end`` adds the mark by which a chat ends."""

    async def lines() -> AsyncIterator[str]:
        for piece in pieces:
            named = f"event: {piece['type']}\n" if "type" in piece else ""
            yield f"{named}data: {json.dumps(piece)}\n\n"
        if end:
            yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    # a client that would try again gets the same answer: it has to hear so at once
    headers = {"x-should-retry": "false"}
    kind = "invalid_request_error"
    told = {"message": str(error), "type": kind, "code": error.code, "param": None}
    return JSONResponse({"error": told}, error.status, headers)


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


async def _unknown(request: Request, _: Exception) -> Response:
    return await _refused(request, RefusedError(f"there is no {request.url.path}", 404, "no_path"))


async def _failed(request: Request, error: Exception) -> Response:
    return await _refused(request, RefusedError(f"{type(error).__name__}: {error}", 500, "failed"))

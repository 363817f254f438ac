"""A chat model whose answers are kept on disk: an answer is asked, and paid for, once."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio
from anyio.from_thread import BlockingPortal

from tasks.chat.contract import ChatReply, ChatRequest

Answer = Callable[[ChatRequest], Awaitable[ChatReply]]


@dataclass
class Usage:
    """What a model has been asked since it was opened."""

    asked: int = 0  # requests that went to the model
    cached: int = 0  # requests that were answered from disk
    failed: int = 0  # requests that have no answer
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Cached:
    """A chat model (``ChatModel``) over a function that answers one request.

    An answer is written under a temporary name and renamed before it is returned, so a process that
    is killed loses none that it has used. Any number of threads may ask at once; equal requests
    that are under way share one answer. Failed requests are not kept.
    """

    def __init__(
        self, name: str, answer: Answer, folder: Path, portal: BlockingPortal, concurrency: int
    ) -> None:
        """``folder``: of the answers; ``portal``: the event loop that ``answer`` runs in."""
        self.name = name
        self.usage = Usage()
        self._answer = answer
        self._folder = folder
        self._portal = portal
        self._room = portal.call(anyio.CapacityLimiter, concurrency)
        self._under_way: dict[str, anyio.Event] = {}

    def ask(self, requests: Sequence[ChatRequest]) -> list[ChatReply]:
        """Answer the requests side by side (``ChatModel.ask``)."""
        try:
            return self._portal.call(self._ask, requests)
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    async def _ask(self, requests: Sequence[ChatRequest]) -> list[ChatReply]:
        replies: dict[int, ChatReply] = {}

        async def one(index: int, request: ChatRequest) -> None:
            replies[index] = await self._once(request)

        async with anyio.create_task_group() as group:
            for index, request in enumerate(requests):
                group.start_soon(one, index, request)
        return [replies[index] for index in range(len(requests))]

    async def _once(self, request: ChatRequest) -> ChatReply:
        """Return the kept answer, or ask for it; wait where an equal request is under way."""
        digest = digest_of(self.name, request)
        file = self._folder / "answers" / digest[:2] / f"{digest}.json"
        while digest in self._under_way:
            await self._under_way[digest].wait()
        if (cached_reply := load_reply(file)) is not None:
            self.usage.cached += 1
            return cached_reply
        self._under_way[digest] = anyio.Event()
        try:
            async with self._room:
                reply = await self._answer(request)
            if reply.fault:
                self.usage.failed += 1
            else:
                save_reply(file, self.name, request, reply)
            self.usage.asked += 1
            self.usage.prompt_tokens += reply.prompt_tokens
            self.usage.completion_tokens += reply.completion_tokens
            return reply
        finally:
            self._under_way.pop(digest).set()


def digest_of(name: str, request: ChatRequest) -> str:
    """Return the digest of everything that decides an answer: the model's name and the request."""
    request_json = json.dumps([name, asdict(request)], sort_keys=True)
    return hashlib.blake2b(request_json.encode(), digest_size=16).hexdigest()


def load_reply(file: Path) -> ChatReply | None:
    """Return a kept answer; None where there is none, or none that can be read."""
    try:
        return ChatReply(**json.loads(file.read_text())["reply"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save_reply(file: Path, name: str, request: ChatRequest, reply: ChatReply) -> None:
    """Keep an answer, with what was asked. It survives a crash of the machine, too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"model": name, "request": asdict(request), "reply": asdict(reply)})
    with tempfile.NamedTemporaryFile(
        "w", dir=file.parent, prefix=".", suffix=".partial", delete=False
    ) as partial:
        partial.write(text)
        partial.flush()
        os.fsync(partial.fileno())
    Path(partial.name).replace(file)


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group of tasks, whatever its depth."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error

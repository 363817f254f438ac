"""Keep connections to MCP servers, in a thread with an event loop of its own.

A connection lives in a task of its own: the library ends that task when the server goes away, and
whoever waits for an answer sees it end. The next call connects again, after a pause that doubles.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2
from anyio.from_thread import start_blocking_portal
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    CallToolResult,
    ContentBlock,
    Tool,
)
from pydantic import TypeAdapter, ValidationError

from params.schema.addresses import is_loopback
from tasks.chat.bounded_answers import UNPACKED, bound
from tasks.extensions import descendants
from tasks.tools import mcp_guard
from tasks.tools.mcp_settings import McpServer, McpTools, plain_name, secrets_of, shown
from tasks.trees.outcomes import FAILURES_TO_BLAME, Outcome
from tasks.trees.tree import Observation
from tasks.trees.words import printable

logger = logging.getLogger(__name__)

Asked = tuple["Connection", str, dict[str, Any]]  # server, the server's name of the tool, arguments

PAUSE = 0.2  # seconds before the second attempt of a call; doubles
PATIENCE = 2.0  # seconds until a server that let a call time out must list its tools
GOODBYE = 10.0  # seconds for a server to end; the library kills its process after about 6
PAGES = 100  # of a list of tools, at most
TOOLS = 1000  # of a server, at most: more descriptions have no room in a prompt
PARTS = 1000  # of a result; each is checked while all servers wait
LISTED = 8 * 2**20  # characters of a whole list, at most
OFFERED = 400_000  # characters of the tools that an agent is told of, at most: 100,000 tokens
ANSWER_BYTES = mcp_guard.LINE_BYTES  # of one message by HTTP, as of one line of a command
# Messages that a server may send within FLOOD_SECONDS: each takes a tenth of a millisecond of the
# thread that all servers share.
MESSAGES = 10_000
FLOOD_SECONDS = 10.0
RESUME_PAUSE = 1.0  # seconds before an answer that broke off is asked for again, as mcp's own
TAIL = 500  # characters of what a server that did not start wrote to its standard error
SHOWN = 500  # characters of what a server or a library says of a failure
NAME = 128  # characters of a tool's name; chat templates and services take no more
KIND = 40  # characters of the type of a part
# What the server, not one of its tools, answers after it was started anew or replaced.
_GONE = (CONNECTION_CLOSED, INVALID_REQUEST, METHOD_NOT_FOUND)
_PART: TypeAdapter[Any] = TypeAdapter(ContentBlock)
_UNREAD = "Failed to parse "  # begins the library's message for what it cannot read
_HTTP_ERROR = "Server returned an error response"  # the library's message for 401, 500, 503, ...


class UnreachableError(Exception):
    """The server cannot be reached now."""


class ServiceError(UnreachableError):
    """A service answered with an error of HTTP: it refuses, is busy or has failed."""


class UnusableError(Exception):
    """The server answers, and what it answers cannot be used."""


class ChangedError(Exception):
    """The server came back with another tool than the agent was told of."""


@contextmanager
def connected(
    settings: McpTools,
) -> Iterator[tuple[Callable[[Sequence[Asked], int], list[Observation]], dict[str, Connection]]]:
    """Connect to all servers; yield a function that answers calls side by side, and the servers.

    Raises ValueError for the first server that cannot be reached.
    """
    connections = {
        name: Connection(name, server, settings.seconds, settings.attempts)
        for name, server in settings.servers.items()
    }
    # The library logs a traceback for each message that it drops; the outcome of a call says it.
    for name in ("mcp", "client"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with start_blocking_portal(name="mcp") as portal:

        def call(requests: Sequence[Asked], workers: int) -> list[Observation]:
            return portal.call(_answers, requests, workers)

        try:
            portal.call(_open, list(connections.values()))
            yield call, connections
        finally:
            portal.call(_close, list(connections.values()))


async def _open(connections: Sequence[Connection]) -> None:
    results = await asyncio.gather(*(one.open() for one in connections), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def _close(connections: Sequence[Connection]) -> None:
    await asyncio.gather(*(one.close() for one in connections))


async def _answers(requests: Sequence[Asked], workers: int) -> list[Observation]:
    """Answer calls in order, at most ``workers`` of them at a time."""
    room = asyncio.Semaphore(workers)

    async def answer(connection: Connection, tool: str, values: dict[str, Any]) -> Observation:
        async with room:
            return await connection.call(tool, values)

    return list(await asyncio.gather(*(answer(*one) for one in requests)))


@dataclass
class _Held:
    """A connection that stands: its client, the tools that the server listed, and its task."""

    client: Client
    tools: dict[str, Tool]
    task: asyncio.Task[None]
    closing: asyncio.Event


@dataclass(eq=False)
class _UnderWay:
    """A call that a server works on; ``shared``: beside others."""

    shared: bool = False


@dataclass
class Connection:
    """One server, connected to when a call needs it.

    A server that goes away or is slow may be so because of another call that it worked on. Such a
    call is repeated by itself, so that outcomes do not depend on what ran beside it.
    """

    name: str
    server: McpServer
    seconds: float  # of a call
    attempts: int  # connections that a call tries
    offered: dict[str, Tool] = field(default_factory=dict)  # what the agent was told of
    _held: _Held | None = None
    _starting: asyncio.Task[_Held] | None = None
    _checks: set[asyncio.Task[None]] = field(default_factory=set)
    _under_way: set[_UnderWay] = field(default_factory=set)
    _repeating: asyncio.Lock = field(default_factory=asyncio.Lock)
    _ended_one: asyncio.Event = field(default_factory=asyncio.Event)

    async def open(self) -> None:
        """Connect for the first time. Raises ValueError with what went wrong and the remedy."""
        try:
            held = await self._standing()
        except UnreachableError as error:
            raise ValueError(f"tools.mcp: server {self.name} cannot be reached: {error}") from error
        names = list(held.tools) if self.server.only is None else self.server.only
        secrets = secrets_of([self.server])
        if missing := [tool for tool in names if tool not in held.tools]:
            listed = ", ".join(tool[: NAME + 1] for tool in held.tools if tool)
            raise ValueError(
                f"tools.mcp: server {self.name} has no tool {missing[0]}: it has "
                f"{printable(shown(listed, secrets))[:SHOWN] or 'none'}"
            )
        if faults := [fault for tool in names if (fault := _name_fault(tool, secrets))]:
            raise ValueError(
                f"tools.mcp: server {self.name} has a tool {faults[0]}: name the tools that the "
                "agent gets in its setting only"
            )
        self.offered = {tool: held.tools[tool] for tool in names}
        if (characters := sum(len(_told(tool)) for tool in self.offered.values())) > OFFERED:
            raise ValueError(
                f"tools.mcp: server {self.name} describes its tools in {characters} characters, at "
                f"most {OFFERED} have room: choose some in its setting only"
            )

    async def close(self) -> None:
        """End the connection, and the process of a command."""
        for task in self._checks:
            task.cancel()
        if self._starting:
            with suppress(UnreachableError):
                await self._starting
        if self._held:
            await _end(self._held)

    async def call(self, tool: str, values: dict[str, Any]) -> Observation:
        """Call a tool of the server. Raises nothing: what went wrong is the outcome."""
        async with self._beside_others() as under_way:
            seen, unclear = await self._tried(tool, values)
        if unclear and under_way.shared:
            async with self._by_itself():
                seen, _ = await self._tried(tool, values)
        return seen

    @asynccontextmanager
    async def _beside_others(self) -> AsyncIterator[_UnderWay]:
        """Note that a call is under way."""
        async with self._repeating:
            pass
        mine = _UnderWay(shared=bool(self._under_way))
        for other in self._under_way:
            other.shared = True
        self._under_way.add(mine)
        try:
            yield mine
        finally:
            self._under_way.discard(mine)
            self._ended_one.set()

    @asynccontextmanager
    async def _by_itself(self) -> AsyncIterator[None]:
        """Wait until no call is under way, and let none begin."""
        async with self._repeating:
            while self._under_way:
                self._ended_one.clear()
                await self._ended_one.wait()
            # A server that still works on what has timed out is ended.
            await asyncio.gather(*self._checks, return_exceptions=True)
            yield

    async def _tried(self, tool: str, values: dict[str, Any]) -> tuple[Observation, bool]:
        """Return what a call gave, and whether the server failed while it worked on it."""
        sent, ended = False, 0  # how often the server went away in this call
        try:
            async with asyncio.timeout(self.seconds):
                for attempt in range(self.attempts):
                    if attempt:
                        await asyncio.sleep(PAUSE * 2 ** (attempt - 1))
                    sent, reason = False, ""
                    try:
                        held = await self._standing()
                        self._check_unchanged(held, tool)
                        sent = True
                        return _observation(await _sent(held, tool, values)), False
                    except UnreachableError as error:
                        reason = str(error)
                        ended += sent and not isinstance(error, ServiceError)
                if ended >= FAILURES_TO_BLAME:
                    return Observation(Outcome.KILLED, f"{self.name} ended: {reason}"), True
                return self._unavailable(reason), ended > 0
        except TimeoutError:
            if not sent:
                return self._unavailable("it did not come back in time"), False
            self._check_soon()
            return Observation(Outcome.TIMEOUT, ""), True
        except Exception as error:
            return self._failed(tool, error), False

    def _failed(self, tool: str, error: Exception) -> Observation:
        """Return what an error of the server means, or of an answer that cannot be read."""
        if isinstance(error, ChangedError):
            return Observation(Outcome.TOOLS_CHANGED, str(error))
        if isinstance(error, MCPError) and not _is_unread(error):
            return Observation(Outcome.ERROR, error.message)
        words = shown(str(error), secrets_of([self.server]))[:SHOWN]
        logger.info("server %s, tool %s: %s", self.name, plain_name(tool), words)
        return Observation(Outcome.ERROR, f"{self.name} gave an answer that cannot be read")

    def _unavailable(self, reason: str) -> Observation:
        return Observation(Outcome.UNAVAILABLE, f"{self.name} is not available: {reason}")

    def _check_unchanged(self, held: _Held, tool: str) -> None:
        if held.tools.get(tool) and _told(held.tools[tool]) == _told(self.offered[tool]):
            return
        raise ChangedError(
            f"{self.name} came back with another tool {plain_name(tool)} than before"
        )

    async def _standing(self) -> _Held:
        """Return the connection; where there is none, make one that all callers wait for."""
        if self._held and not self._held.task.done() and not self._held.closing.is_set():
            return self._held
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(asyncio.Task.exception)  # it may have no reader left
        return await asyncio.shield(self._starting)

    async def _start(self) -> _Held:
        if self._held:
            await _end(self._held)
            self._held = None
        ready: asyncio.Future[tuple[Client, dict[str, Tool]]] = asyncio.Future()
        closing = asyncio.Event()
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            task = asyncio.create_task(_hold(self.server, said, ready, closing))
            either: set[asyncio.Future[Any]] = {ready, task}
            await asyncio.wait(
                either,
                timeout=self.server.start_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not ready.done():
                task.cancel()
                reason = await _reason(task, self.server.start_seconds)
                secrets = secrets_of([self.server])
                raise UnreachableError(shown(reason, secrets)[:SHOWN] + _tail(said, secrets))
        client, tools = ready.result()
        self._held = _Held(client, tools, task, closing)
        return self._held

    def _check_soon(self) -> None:
        """End the connection in the background if the server answers nothing any more."""
        if self._held:
            check = asyncio.create_task(_end_if_stuck(self._held))
            self._checks.add(check)
            check.add_done_callback(self._checks.discard)


# ---------------------------------------------------------------- one connection


async def _hold(
    server: McpServer,
    said: Any,
    ready: asyncio.Future[tuple[Client, dict[str, Tool]]],
    closing: asyncio.Event,
) -> None:
    """Connect, tell ``ready``, and keep the connection until ``closing`` or the server ends it."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(await _transport(server, said, stack)))
        tools = await _listed(client, server.only)
        ready.set_result((client, tools))
        await closing.wait()


async def _transport(server: McpServer, said: Any, stack: AsyncExitStack) -> Any:
    if server.url:
        headers = {name: os.environ.get(value, "") for name, value in server.headers.items()}
        limits = httpx2.Timeout(30.0, read=300.0)  # as mcp's own: a server may hold a stream open
        http = httpx2.AsyncClient(
            headers=UNPACKED | headers,
            timeout=limits,
            trust_env=not is_loopback(server.url),
            follow_redirects=False,  # headers may hold a key
            event_hooks={"request": [_before_request]},
        )
        await stack.enter_async_context(bound(http, ANSWER_BYTES))
        return _readable(streamable_http_client(server.url, http_client=http))
    given = descendants.owned({name: os.environ.get(name, "") for name in server.environment})
    guarded = ["-I", "-S", mcp_guard.__file__, str(os.getpid()), *server.command]
    return _readable(
        stdio_client(
            StdioServerParameters(
                command=sys.executable, args=guarded, env=given, encoding_error_handler="replace"
            ),
            errlog=said,
        )
    )


async def _before_request(request: httpx2.Request) -> None:
    """Keep a server from making this one spin: by a stream beside the calls, or by resumptions.

    Nothing that comes by such a stream is used. Raises RequestError.
    """
    if request.method == "GET":
        if "last-event-id" not in request.headers:
            raise httpx2.RequestError("a stream beside the calls is not read")
        await asyncio.sleep(RESUME_PAUSE)


@asynccontextmanager
async def _readable(transport: Any) -> AsyncIterator[Any]:
    """Open a transport whose messages hold only parts of results that the library can read."""
    async with transport as (read, *others):
        yield ReadableParts(read), *others


class ReadableParts:
    """A stream of a server's messages, in whose results other parts are named in a text.

    It ends with UnusableError where the server sends too many.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._count, self._since = 0, time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> ReadableParts:
        """Open the stream."""
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        """Close the stream."""
        return await self._stream.__aexit__(*error)

    def __aiter__(self) -> ReadableParts:
        """Return the stream."""
        return self

    async def __anext__(self) -> Any:
        """Return the next message."""
        return with_readable_parts(self._counted(await self._stream.__anext__()))

    async def receive(self) -> Any:
        """Return the next message."""
        return with_readable_parts(self._counted(await self._stream.receive()))

    def _counted(self, item: Any) -> Any:
        if time.monotonic() - self._since > FLOOD_SECONDS:
            self._count, self._since = 0, time.monotonic()
        self._count += 1
        if self._count > MESSAGES:
            raise UnusableError(f"it sent more than {MESSAGES} messages in {FLOOD_SECONDS:g} s")
        return item


def with_readable_parts(item: Any) -> Any:
    """Return a message of a server whose result the library can read, in bounded time.

    Parts that it cannot read are texts. No tool has a schema of its results, which the library
    would check them against, however long that takes.
    """
    result = getattr(getattr(item, "message", None), "result", None)
    if not isinstance(result, dict):
        return item
    content, tools = result.get("content"), result.get("tools")
    if isinstance(content, list):
        result["content"] = [_readable_part(part) for part in content[:PARTS]]
        if len(content) > PARTS:
            more = f"[{len(content) - PARTS} further parts are not shown]"
            result["content"].append(_text(more))
    if isinstance(tools, list):
        result["tools"] = tools[: TOOLS + 1]  # one more than are read, so that it is noticed
        for tool in result["tools"]:
            if isinstance(tool, dict):
                tool.pop("outputSchema", None)
    return item


def _text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def _readable_part(part: Any) -> Any:
    try:
        _PART.validate_python(part, by_name=False)
    except ValidationError:
        kind = part.get("type") if isinstance(part, dict) else None
        named = f"of type {kind[:KIND]} " if isinstance(kind, str) else ""
        return _text(f"[a part {named}cannot be shown]")
    return part


async def _listed(client: Client, only: Sequence[str] | None) -> dict[str, Tool]:
    """Return the tools that a server lists, until all of ``only`` are among them.

    Raises UnusableError for a list that does not end, or has too many tools.
    """
    tools: dict[str, Tool] = {}
    cursors: list[str | None] = [None]
    read = characters = 0
    while len(cursors) <= PAGES and characters <= LISTED:
        page = await client.list_tools(cursor=cursors[-1], cache_mode="refresh")
        tools |= {tool.name: tool for tool in page.tools}
        read += len(page.tools)
        characters += sum(len(_told(tool)) for tool in page.tools)
        if only is not None and tools.keys() >= set(only):
            return tools
        if read > TOOLS and page.next_cursor is None:
            raise UnusableError(f"it lists more than {TOOLS} tools")
        if page.next_cursor is None:
            return tools
        if read > TOOLS or page.next_cursor in cursors:
            break
        cursors.append(page.next_cursor)
    raise UnusableError(
        f"its list of tools has no end ({len(tools)} tools on {len(cursors)} pages, and the next "
        f"page is named): at most {TOOLS} tools on {PAGES} pages are read"
    )


async def _sent(held: _Held, tool: str, values: dict[str, Any]) -> CallToolResult:
    """Send a call and wait for its answer. Raises UnreachableError where the server went away."""
    answer = asyncio.ensure_future(held.client.call_tool(tool, _encodable(values)))
    try:
        await asyncio.wait({answer, held.task}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done() or answer.cancelled():
            raise UnreachableError(_why_ended(held.task) or "it went away")
        return answer.result()
    except MCPError as error:
        refused = error.message == _HTTP_ERROR
        if error.code in _GONE or refused:
            held.closing.set()
            await asyncio.wait({held.task}, timeout=PATIENCE)  # as the next attempt would
            kind = ServiceError if refused else UnreachableError
            raise kind(_why_ended(held.task) or error.message) from error
        raise
    finally:
        answer.cancel()


def _encodable(values: dict[str, Any]) -> Any:
    """Return arguments without lone surrogates, which end a connection when they are written."""
    return json.loads(json.dumps(values, ensure_ascii=False).encode(errors="replace"))


async def _end_if_stuck(held: _Held) -> None:
    """End a connection whose server does not even list its tools: a stuck process is killed."""
    try:
        async with asyncio.timeout(PATIENCE):
            await held.client.list_tools(cache_mode="refresh")
    except Exception:
        await _end(held)


async def _end(held: _Held) -> None:
    held.closing.set()
    await asyncio.wait({held.task}, timeout=GOODBYE)
    if held.task.done() and not held.task.cancelled():
        held.task.exception()  # of a server that went away: it is known


def _why_ended(task: asyncio.Task[None]) -> str:
    error = _cause(task)
    return str(error) if isinstance(error, UnusableError) else ""


def _cause(task: asyncio.Task[None]) -> BaseException | None:
    """Return the exception that ended a task, the first of a group."""
    error = task.exception() if task.done() and not task.cancelled() else None
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _reason(task: asyncio.Task[None], seconds: float) -> str:
    await asyncio.wait({task}, timeout=GOODBYE)
    error = _cause(task)
    if error is None:
        return f"no answer within {seconds:g} s"
    if isinstance(error, UnusableError):
        return str(error)
    if isinstance(error, ValidationError) or _is_unread(error):
        return "it answered something that is no MCP"
    if isinstance(error, MCPError):
        return error.message
    return f"{type(error).__name__}: {error}"


def _is_unread(error: BaseException) -> bool:
    """Return whether the library says, in its own words, that it cannot read an answer."""
    return (
        isinstance(error, MCPError)
        and error.code == PARSE_ERROR
        and error.message.startswith(_UNREAD)
    )


def _tail(said: Any, secrets: Mapping[str, str]) -> str:
    """Return the end of what a server wrote to its standard error, for a message."""
    said.seek(0)
    text = shown(said.read(), secrets).strip()[-TAIL:]
    return f"; it said: {text}" if text else ""


def _name_fault(name: str, secrets: Mapping[str, str]) -> str:
    if not name or len(name) > NAME:
        return f"whose name has {len(name)} characters, not 1 to {NAME}"
    if any(plain_name(secret) in plain_name(name) for secret in secrets):
        return "whose name holds the value of a variable that the server was given"
    return ""


def _told(tool: Tool) -> str:
    """Return what an agent knows of a tool, as one text."""
    return json.dumps([tool.description, tool.title, tool.input_schema], sort_keys=True)


# ---------------------------------------------------------------- results


def _observation(result: CallToolResult) -> Observation:
    text = "\n".join(_part(part) for part in result.content)
    if not result.content and result.structured_content is not None:
        text = json.dumps(result.structured_content)
    return Observation(Outcome.ERROR if result.is_error else Outcome.OK, text)


def _part(part: Any) -> str:
    """Return the text of one part of a result; other parts are only named."""
    if part.type == "resource" and getattr(part.resource, "text", None) is not None:
        return str(part.resource.text)
    names: Mapping[str, str] = {"resource_link": "resource"}
    return str(part.text) if part.type == "text" else f"[{names.get(part.type, part.type)}]"

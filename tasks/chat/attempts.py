"""Ask an OpenAI-compatible server: attempts, waits between them, and their cost.

What is asked is a ``ServerCall``: those of chats are in endpoint.py, those that score given tokens
in given_tokens.py.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Generic, TypeVar
from urllib.parse import urljoin

import anyio
import httpx2
import openai

from params.schema.addresses import is_loopback, read_key
from params.schema.chat import ChatLimits, Endpoint
from tasks.chat.bounded_answers import UNPACKED, TooLongError, bound
from tasks.chat.call_budget import CallBudget, Spent
from tasks.trees.words import printable

FIRST_WAIT = 0.5  # seconds before the first retry; each further one waits twice as long
LONGEST_WAIT = 120.0  # seconds; a server that asks for more is not asked again
TEMPORARY = (408, 409, 429)  # statuses after which a retry may succeed, beside those from 500 on
SHOWN = 200  # characters of a server's message
ANSWER_BYTES = 16 * 2**20  # of an answer, at most: a hundred times the longest texts of models
MOST_TOKENS = 10_000_000  # that one call can have cost; more is no count
FREE = Spent(0, 0)  # what an attempt costs that the server refused

Reply = TypeVar("Reply")


class AttemptError(Exception):
    """An attempt without an answer.

    ``spent``: what it has cost, None where that is unknown. ``wait``: the seconds that the server
    asks for. ``final``: no retry will help.
    """

    def __init__(
        self,
        fault: str,
        spent: Spent | None = None,
        wait: float | None = None,
        final: bool = False,
    ) -> None:
        super().__init__(fault)
        self.fault = fault
        self.spent = spent
        self.wait = wait
        self.final = final


@dataclass(frozen=True)
class ChatConnection:
    """A connection to a server, and the settings of its section of the recipe (``place``)."""

    client: openai.AsyncOpenAI
    endpoint: Endpoint
    limits: ChatLimits
    place: str


@dataclass(frozen=True)
class ServerCall(Generic[Reply]):
    """What one call asks."""

    send: Callable[[ChatConnection], Awaitable[Any]]  # returns the library's raw response
    # The reply and its cost, None where the server tells none. Raises AttemptError where there is
    # no reply in the body.
    read: Callable[[object], tuple[Reply, Spent | None]]
    most_tokens: int  # that it can cost


@asynccontextmanager
async def connect(
    endpoint: Endpoint, limits: ChatLimits, section: str
) -> AsyncIterator[ChatConnection]:
    """Keep connections to a server. Raises ValueError where the key is not set."""
    key = read_key(section, endpoint.key_variable)
    client = openai.AsyncOpenAI(
        api_key=key or "none",  # the library would look for OPENAI_API_KEY without one
        base_url=endpoint.url,
        timeout=limits.timeout_seconds,
        max_retries=0,
        default_headers=UNPACKED,
        http_client=bound(
            openai.DefaultAsyncHttpxClient(
                trust_env=not is_loopback(endpoint.url), follow_redirects=False
            ),
            ANSWER_BYTES,
        ),
    )
    async with client:
        yield ChatConnection(client, endpoint, limits, section)


async def ask(server: ChatConnection, budget: CallBudget, call: ServerCall[Reply]) -> Reply:
    """Return the first good reply of several attempts.

    Raises AttemptError with the last one's fault, and RuntimeError, with the remedy, where no call
    can succeed.
    """
    dice = random.Random(os.urandom(8))  # its own: a wait must not move the seeded one
    for number in range(server.limits.retries + 1):
        try:
            return await _paid_attempt(server, budget, call)
        except AttemptError as error:
            last = error
            if error.final or (error.wait or 0) > LONGEST_WAIT:
                break
        if number < server.limits.retries:
            backoff = min(FIRST_WAIT * 2**number, LONGEST_WAIT)
            wait = backoff if last.wait is None else last.wait
            await anyio.sleep(wait * dice.uniform(1.0, 1.25))
    if last.fault == "no connection":
        raise RuntimeError(
            f"{server.place}: no connection to {server.endpoint.url} in {number + 1} attempts: "
            f"start the server of {server.endpoint.name}, or correct the url; all answers so far "
            "are kept"
        )
    raise last


async def _paid_attempt(
    server: ChatConnection, budget: CallBudget, call: ServerCall[Reply]
) -> Reply:
    """Make one attempt within the budget, and finish it even where the others end with an error.

    Raises AttemptError.
    """
    reserved = await budget.reserve(call.most_tokens)
    spent: Spent | None = None  # also where the attempt ends with another error
    try:
        with anyio.CancelScope(shield=True):
            reply, spent = call.read(await _attempt(server, call))
    except AttemptError as error:
        spent = error.spent
        raise
    finally:
        budget.settle(reserved, spent)
    return reply


async def _attempt(server: ChatConnection, call: ServerCall[Any]) -> object:
    """Send a call once, and return the body of the answer. Raises AttemptError."""
    try:
        with anyio.fail_after(server.limits.timeout_seconds):
            return (await call.send(server)).http_response.json()
    except (TimeoutError, openai.APITimeoutError):
        raise AttemptError("timeout") from None
    except openai.APIConnectionError as error:
        if isinstance(error.__cause__, TooLongError):
            raise AttemptError(str(error.__cause__)) from None
        if isinstance(error.__cause__, httpx2.ConnectError):
            raise AttemptError("no connection", FREE) from None
        raise AttemptError("connection lost") from None
    except openai.APIStatusError as error:
        raise _refused(server, error) from None
    except Exception:  # whatever an answer makes the libraries raise
        raise AttemptError("malformed") from None


def _refused(server: ChatConnection, error: openai.APIStatusError) -> Exception:
    """Return what a status other than 200 means."""
    endpoint, status = server.endpoint, error.status_code
    refusal = f"{server.place}: {endpoint.url} answered with the status {status}"
    if 300 <= status < 400:
        location = error.response.headers.get("location")
        target = _target(endpoint.url, location) if location else "no address"
        return RuntimeError(
            f"{refusal}: it redirects to {target}, where nothing was sent: set the "
            f"url of {endpoint.name} to the address that answers"
        )
    if status in (401, 403):
        remedy = (
            f"put a valid key into the environment variable {endpoint.key_variable}"
            if endpoint.key_variable
            else "the server wants a key: name its environment variable in key_variable"
        )
        return RuntimeError(f"{refusal}: {remedy}")
    if status == 404:
        return RuntimeError(
            f"{refusal}: it has no model '{endpoint.name}', or the url is wrong: curl "
            f"{endpoint.url.rstrip('/')}/models lists its models"
        )
    if error.code == "insufficient_quota":
        return RuntimeError(f"{refusal}: the account of the key has no credit left: top it up")
    if status in TEMPORARY or status >= 500:
        return AttemptError(str(status), FREE, _retry_after(error.response.headers))
    said = error.message
    if endpoint.key_variable:
        said = said.replace(server.client.api_key, "***")
    line = " ".join(printable(said[: 2 * SHOWN]).split())
    return AttemptError(f"{status}: {line[:SHOWN]}", FREE, final=True)


def _target(url: str, location: str) -> str:
    """Return where a server redirects to, as a printable line."""
    with suppress(ValueError):  # no address
        location = urljoin(url, location)
    return ascii(location[:SHOWN])


def _retry_after(headers: httpx2.Headers) -> float | None:
    """Return the seconds that a server asks to wait, given as a number or a date."""
    text = headers.get("retry-after", "").strip()
    try:
        wait = float(text)
    except ValueError:
        try:
            wait = (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, wait) if wait == wait else None


def cost(body: object) -> tuple[Spent | None, int, int]:
    """Return what an answer says that it has cost, and its tokens: of the prompt, of the rest.

    A cost that cannot be is unknown, so that no server changes the account of the budget by it.
    """
    usage = entry(body, "usage")
    prompt, completion = (_count(entry(usage, f"{of}_tokens")) for of in ("prompt", "completion"))
    if prompt is None or completion is None:
        return None, 0, 0
    return Spent(1, prompt + completion), prompt, completion


def first_choice(body: object) -> Any:
    """Return the first choice of an answer, None where there is none."""
    choices = entry(body, "choices")
    return choices[0] if isinstance(choices, list) and choices else None


def entry(value: object, name: str) -> Any:
    """Return an entry of an object, None for anything else."""
    return value.get(name) if isinstance(value, dict) else None


def _count(tokens: object) -> int | None:
    """Return a count of tokens as a server tells it; None where it is no such number."""
    if not isinstance(tokens, int) or isinstance(tokens, bool):
        return None
    return tokens if 0 <= tokens <= MOST_TOKENS else None

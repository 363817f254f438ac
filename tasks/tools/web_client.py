"""What the tools of the web share: bounded requests, retries, budgets, keys and safe text.

Whatever goes wrong on the way to a server is a WebError, which the tool turns into an observation.
Its reason names the host and the kind of the failure, and never what a library says about it: an
error text may quote a header with a key.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

import anyio
import httpx

from params.schema.addresses import key_fault
from tasks.tools.recording import replay_folder
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Observation
from tasks.trees.words import safe

Made = TypeVar("Made")
Asked = TypeVar("Asked")

FIRST_WAIT = 0.5  # seconds before the first retry; each further one waits twice as long
LONGEST_WAIT = 60.0  # seconds, before a retry
SHOWN = 200  # characters of an address in a message
PACKED = ("gzip", "x-gzip", "deflate")  # codings of a body that are unpacked here
ENCODINGS = {"Accept-Encoding": "gzip, deflate"}


class WebError(Exception):
    """A request without a usable answer; ``retry_after``: seconds, None where none will help."""

    def __init__(self, outcome: Outcome, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason
        self.retry_after = retry_after

    @property
    def observation(self) -> Observation:
        """Return what the agent sees of it."""
        return Observation(self.outcome, self.reason)


class SettingError(RuntimeError):
    """A service of the recipe answers what no agent can cause: a setting or a key is wrong."""


class NoConnectionError(WebError):
    """No connection could be made to an address."""


@contextmanager
def reported_as(outcome: Outcome, of: Outcome) -> Iterator[None]:
    """Raise errors of the outcome ``of`` with another ``outcome``, which says whose doing it is."""
    try:
        yield
    except WebError as error:
        raise (WebError(outcome, error.reason) if error.outcome == of else error) from None


@dataclass(frozen=True)
class WebAnswer:
    """What a server answered: its body is whole and within the limit."""

    status: int
    headers: httpx.Headers
    body: bytes


class RequestBudget:
    """How many requests may still be sent; None: any number. Used by one thread."""

    def __init__(self, most: int | None) -> None:
        self.most = most
        self.left = most

    def spend(self) -> None:
        """Count one request. Raises WebError (OVER_BUDGET) where none is left."""
        if self.left is None:
            return
        if self.left <= 0:
            reason = f"the budget of {self.most} requests is spent: nothing was asked"
            raise WebError(Outcome.OVER_BUDGET, reason)
        self.left -= 1


async def exchange(
    client: httpx.AsyncClient, request: httpx.Request, host: str, seconds: float, most: int
) -> WebAnswer:
    """Send a request and read its answer of at most ``most`` bytes, all within ``seconds``.

    Raises WebError for everything else, for the status 429 and those from 500 on.
    """
    try:
        with anyio.fail_after(seconds):
            response = await client.send(request, stream=True)
            try:
                body = await _body(response, host, most)
            finally:
                await response.aclose()
    except (TimeoutError, httpx.TimeoutException):
        raise WebError(Outcome.TIMEOUT, f"{host} did not answer within {seconds:g} s") from None
    except httpx.ConnectError:
        raise NoConnectionError(Outcome.UNAVAILABLE, f"no connection to {host}", 0) from None
    except WebError:
        raise
    except Exception as error:  # whatever a server makes the libraries raise
        reason = f"{host} did not answer properly ({type(error).__name__})"
        raise WebError(Outcome.UNAVAILABLE, reason, 0) from None
    if response.status_code == 429 or response.status_code >= 500:
        reason = f"{host} answered with the status {response.status_code}"
        raise WebError(Outcome.UNAVAILABLE, reason, _retry_after(response.headers))
    return WebAnswer(response.status_code, response.headers, body)


def check_admitted(
    request: httpx.Request, answer: WebAnswer, section: str, key_variable: str | None
) -> None:
    """Raise SettingError where a service of the recipe lets nobody in, whatever is asked.

    Such answers would otherwise leave out every trajectory that asks it, and training would go on
    with those that do not. ``section``: where the recipe has its url and key_variable.
    """
    key = f"the key in the environment variable {key_variable}" if key_variable else "no key"
    remedies = {
        401: f"it does not know {key}: set {section}.key_variable to one with a valid key",
        402: f"the account of {key} has no credit left: top it up",
        403: f"it refuses {key}: set {section}.key_variable to one with a key that may ask",
        404: f"nothing is there: correct {section}.url",
    }
    if answer.status in remedies:
        raise SettingError(
            f"{request.url.host} answered with the status {answer.status}: "
            f"{remedies[answer.status]}; what was answered before is kept"
        )


def check_not_moved(request: httpx.Request, answer: WebAnswer, setting: str) -> None:
    """Raise WebError where a server of the recipe redirects: a key must not go elsewhere.

    ``setting``: where the recipe has the server's address.
    """
    if 300 <= answer.status < 400:
        target = safe(answer.headers.get("location", "no address"))[:SHOWN]
        reason = f"{request.url.host} redirects to {target}: set {setting} to the address"
        raise WebError(Outcome.UNAVAILABLE, reason)


async def _body(response: httpx.Response, host: str, most: int) -> bytes:
    """Read a body piece by piece; a packed one is never unpacked further than the limit."""
    coding = response.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", *PACKED):
        raise WebError(Outcome.UNAVAILABLE, f"{host} answered in an unknown coding")
    unpack = zlib.decompressobj(zlib.MAX_WBITS | 32) if coding in PACKED else None
    body = bytearray()
    async for piece in response.aiter_raw():
        body += unpack.decompress(piece, most + 1 - len(body)) if unpack else piece
        if len(body) > most:
            raise WebError(Outcome.UNAVAILABLE, f"{host} answered more than {most} bytes")
    return bytes(body)


def _retry_after(headers: httpx.Headers) -> float:
    """Return the seconds that a server asks to wait, given as a number or a date; 0 if it does not.

    A date without a time zone, or nonsense, counts as no wish.
    """
    text = headers.get("retry-after", "").strip()
    try:
        if text.isascii() and text.isdecimal():
            return float(text)
        wait = parsedate_to_datetime(text) - datetime.now(UTC)
        return max(0.0, wait.total_seconds())
    except (ValueError, TypeError, OverflowError):
        return 0.0


@dataclass
class WaitBudget:
    """How many seconds one call may still wait because servers ask it to."""

    left: float

    @classmethod
    def of(cls, seconds: float, retries: int) -> WaitBudget:
        """Return that of a tool: as long as all its retries of one request may take."""
        return cls(min(seconds * retries, LONGEST_WAIT))


async def retrying(attempt: Callable[[], Awaitable[Made]], retries: int, waits: WaitBudget) -> Made:
    """Return the first good result of ``attempt``, with growing, random waits between attempts.

    Raises the last WebError after ``retries`` further attempts, or at once where a retry is of no
    use or the server asks for a longer wait than is left of ``waits``.
    """
    dice = random.Random()  # its own: a wait must not move the seeded one
    for number in range(retries + 1):
        try:
            return await attempt()
        except WebError as fault:
            retry_after = fault.retry_after
            if retry_after is None or retry_after > waits.left or number == retries:
                raise
            waits.left -= retry_after
            backoff = FIRST_WAIT * 2**number * dice.uniform(0.5, 1.5)
        await anyio.sleep(min(max(retry_after, backoff), LONGEST_WAIT))
    raise AssertionError("the last attempt returns or raises")


async def side_by_side(
    work: Callable[[Asked], Coroutine[None, None, Observation]], inputs: Sequence[Asked]
) -> list[Observation]:
    """Return ``work`` of each item, done concurrently; an error becomes its observation.

    Servers and pages are hostile: what they make a library raise must not end the run. Raises
    SettingError where the recipe's own service can answer nothing.
    """
    observations: list[Observation | None] = [None] * len(inputs)
    refusals: list[SettingError] = []

    async def one(index: int, item: Asked) -> None:
        try:
            observations[index] = await work(item)
        except WebError as fault:
            observations[index] = fault.observation
        except SettingError as error:
            refusals.append(error)
        except Exception as error:
            reason = f"the answer cannot be read ({type(error).__name__})"
            observations[index] = Observation(Outcome.UNAVAILABLE, reason)

    async with anyio.create_task_group() as group:
        for index, item in enumerate(inputs):
            group.start_soon(one, index, item)
    if refusals:
        raise refusals[0]
    return [observation for observation in observations if observation is not None]


# ---------------------------------------------------------------- keys


def key_faults(location: str, variable: str | None) -> list[str]:
    """Return why the key of a setting cannot be used, in one line; empty where it can.

    A replay asks no server and needs no key.
    """
    fault = "" if replay_folder() else key_fault(location, variable)
    return [fault] if fault else []


def read_key(location: str, variable: str | None) -> str:
    """Return the key in an environment variable, "" where none is needed. Raises ValueError."""
    if faults := key_faults(location, variable):
        raise ValueError(faults[0])
    return os.environ.get(variable, "").strip() if variable else ""

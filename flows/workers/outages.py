"""Wait for a lost Prefect server once a run, and remember that it is away.

A run does not need Prefect's server: it shows what runs. Prefect itself waits for a lost one with
each call, for a minute where it hangs. Here the calls of a process share one wait, of PATIENCE
seconds. Then one line says that the run goes on without the server, and further calls fail at once,
in later stages, too. A note (a file) tells the processes of the run, and is removed at its end.

A server that is away is asked again now and then, and by each later stage, with CHECK seconds for
an answer.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from flows.host.addresses import address_without_password, without_password

NOTE = "BEAMLINE_PREFECT_AWAY"  # environment variable: the file that notes the loss
PATIENCE = 20.0  # seconds from the first call that fails; a server that is restarted takes 3 to 10
PAUSE = 0.5  # seconds between two attempts
CHECK = 1.0  # seconds for the answer of a server that was away; one that works takes milliseconds
CHECK_EVERY = 30.0  # seconds between two such attempts of a process: they take 3 % of its time
LOSSES = 2  # after which a server is asked rarely: it answers, but takes no records (a full disk)
RARELY = 600.0  # seconds


class AwayError(httpx.TransportError):
    """Prefect's server is away; it has been said."""

    is_said = True


class PrefectServer:
    """The server that the processes of a run report to, and whether it is away."""

    def __init__(self, address: str, note: Path) -> None:
        self.address = address
        self._note = note
        self._away = False  # beside the note, which a full disk does not take
        self._failing_since: float | None = None  # on the monotonic clock
        self._lock = threading.RLock()
        self._next_check = 0.0
        if self._losses() >= LOSSES:
            self._next_check = time.monotonic() + RARELY

    @property
    def is_away(self) -> bool:
        """Whether this process, or another one of the run, has lost the server."""
        return self._away or self._note.exists()

    @property
    def was_lost(self) -> bool:
        """Whether the run has lost the server before, so that records may be missing there."""
        return self._losses() > 0

    def limits(self) -> dict[str, float]:
        """Return how many seconds the next attempt may take. Raises AwayError for none."""
        with self._lock:
            seconds = PATIENCE if self._failing_since is None else self._left()
            if self.is_away:
                if time.monotonic() < self._next_check:
                    raise AwayError(f"Prefect's server {self._shown} is away")
                rarely = self._losses() >= LOSSES
                self._next_check = time.monotonic() + (RARELY if rarely else CHECK_EVERY)
                seconds = CHECK
            return dict.fromkeys(("connect", "read", "write", "pool"), max(CHECK, seconds))

    def answered(self) -> None:
        """Note that an attempt succeeded."""
        with self._lock:
            self._failing_since = None
            if self.is_away:
                self._away = False
                try:
                    self._note.replace(self._earlier)
                except OSError:
                    if self._earlier.exists():  # another process of the run has said so
                        return
                _say(f"Prefect's server {self._shown} answers again")

    def failed(self, reason: str, began: float) -> None:
        """Note that an attempt failed, which ``began`` at that time of the monotonic clock.

        Raises AwayError where the server is given up.
        """
        with self._lock:
            if self._failing_since is None:
                self._failing_since = began
            if self.is_away or self._left() <= 0:
                self.lose(reason)
                raise AwayError(f"Prefect's server {self._shown} is away: {reason}")

    def lose(self, reason: str) -> None:
        """Remember that the server is away, and say so once a run."""
        with self._lock:
            known, self._away, self._failing_since = self.is_away, True, None
            self._next_check = time.monotonic() + CHECK_EVERY
            if known:
                return
            with suppress(OSError):
                self._note.parent.mkdir(parents=True, exist_ok=True)
                self._note.write_text("lost\n" * (self._losses() + 1))
            _say(
                f"Prefect's server {self._shown} is away ({without_password(reason)}): the run "
                "goes on without it, and its records there are incomplete"
            )

    @property
    def _shown(self) -> str:
        return address_without_password(self.address)

    @property
    def _earlier(self) -> Path:
        return self._note.with_name(f"{self._note.name}.earlier")

    def _losses(self) -> int:
        """Return how often the run has lost the server."""
        for file in (self._note, self._earlier):
            with suppress(OSError):
                return len(file.read_text().splitlines())
        return 0

    def _left(self) -> float:
        assert self._failing_since is not None
        return self._failing_since + PATIENCE - time.monotonic()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def noted(folder: Path) -> Iterator[Path]:
    """Yield the run's note; the outermost process makes its name, and removes it at the end."""
    if known := os.environ.get(NOTE):
        yield Path(known)
        return
    note = folder.absolute() / f"away-{uuid.uuid4().hex}"
    os.environ[NOTE] = str(note)
    try:
        yield note
    finally:
        os.environ.pop(NOTE, None)
        for file in folder.glob(f"{note.name}*"):
            file.unlink(missing_ok=True)


@contextmanager
def bounded(server: PrefectServer) -> Iterator[None]:
    """Let all clients of Prefect in this process share one wait for a server.

    Reason: each call has its own retries, no setting bounds them together, and a server that hangs
    holds each of them for PREFECT_API_REQUEST_TIMEOUT seconds. A new client asks for the server's
    version first, and turns any failure into a RuntimeError: a server that is away has none.
    """
    from prefect.client import base, orchestration

    sync_client, async_client = base.PrefectHttpxSyncClient, base.PrefectHttpxAsyncClient
    sync_send, async_send = sync_client._send_with_retry, async_client._send_with_retry
    api, async_api = orchestration.SyncPrefectClient, orchestration.PrefectClient
    compare = api.raise_for_api_version_mismatch_once
    async_compare = async_api.raise_for_api_version_mismatch_once

    def send_patiently(self: Any, request: Any, send: Any, *others: Any, **options: Any) -> Any:
        return sync_send(self, request, _patient(server, send), *others, **options)

    async def send_async(self: Any, request: Any, send: Any, *others: Any, **options: Any) -> Any:
        return await async_send(self, request, _patient_async(server, send), *others, **options)

    def compare_if_there(self: Any) -> None:
        with _unless_away(server):
            compare(self)

    async def compare_async(self: Any) -> None:
        with _unless_away(server):
            await async_compare(self)

    with (
        _replaced(sync_client, "_send_with_retry", send_patiently),
        _replaced(async_client, "_send_with_retry", send_async),
        _replaced(api, "raise_for_api_version_mismatch_once", compare_if_there),
        _replaced(async_api, "raise_for_api_version_mismatch_once", compare_async),
    ):
        yield


@contextmanager
def _replaced(owner: type, name: str, function: Callable[..., Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _unless_away(server: PrefectServer) -> Iterator[None]:
    try:
        yield
    except RuntimeError:
        if not server.is_away:
            raise


def _patient(server: PrefectServer, send: Callable[..., Any]) -> Callable[..., Any]:
    def attempt(request: httpx.Request, *arguments: Any, **options: Any) -> Any:
        while True:
            request.extensions = {**request.extensions, "timeout": server.limits()}
            began = time.monotonic()
            try:
                response = send(request, *arguments, **options)
            except httpx.TransportError as error:
                server.failed(_described(error), began)
            else:
                if _takes(server, response, began):
                    return response
            time.sleep(PAUSE)

    return attempt


def _patient_async(server: PrefectServer, send: Callable[..., Any]) -> Callable[..., Any]:
    import anyio

    async def attempt(request: httpx.Request, *arguments: Any, **options: Any) -> Any:
        while True:
            request.extensions = {**request.extensions, "timeout": server.limits()}
            began = time.monotonic()
            try:
                response = await send(request, *arguments, **options)
            except httpx.TransportError as error:
                server.failed(_described(error), began)
            else:
                if _takes(server, response, began):
                    return response
            await anyio.sleep(PAUSE)

    return attempt


def _takes(server: PrefectServer, response: httpx.Response, began: float) -> bool:
    """Return whether an answer is one; False for an error of the server itself."""
    if response.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
        server.answered()
        return True
    server.failed(f"it answers with the status {response.status_code}", began)
    return False


def _described(error: httpx.TransportError) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    return str(error) or type(error).__name__

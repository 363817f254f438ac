"""Answer only those who have the server's token; a server runs this before all else.

vLLM's own ``--api-key`` guards some prefixes of paths (``/v1``, ``/inference``), and none of the
calls that load weights, clear caches or put the server to sleep.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import secrets
import stat
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from tasks.engines.servers.uploads import FOLDER, POLICIES, VERSION_HEADER, App, UploadApp

TOKEN = "BEAMLINE_SERVER_TOKEN"  # environment variable of the server, and of the runs that use it
NAMES = "BEAMLINE_SERVER_NAMES"  # environment variable: names of the server, by commas
TOKEN_FILE = Path(".beamline/server.token")
SHORTEST = 16  # characters of a token
Headers = Iterable[tuple[bytes, bytes]]
GENERATE, RPC = "/inference/v1/generate", "/collective_rpc"
CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"  # of clients of OpenAI's protocol
# Calls that change no weights; the version is unknown after any other one, and the run loads anew.
HARMLESS = (GENERATE, CHATS, TEXTS, "/reset_prefix_cache", "/pause", "/resume")
HARMLESS_METHODS = (  # by RPC
    *("measure_entropies", "sample_trees", "draw_from", "policy", "weight_digest"),
)
NAMING_METHODS = {"load_folder": 1, "name_policy": 0}  # by RPC -> which argument is the version


class Guard:
    """An ASGI application before another one; a request that it refuses does not get there.

    It takes policies that are sent (uploads.py), and names the version of the weights in each
    answer: the one that was loaded last, "" after the server has started and where they changed
    while the answer was computed.
    """

    def __init__(self, app: App) -> None:
        """Guard ``app``.

        Raises KeyError without a token and a folder in the environment, and ValueError for a short
        token.
        """
        self.token = _long_enough(os.environ[TOKEN], TOKEN)
        self.app = UploadApp(app, Path(os.environ[FOLDER]))
        self.names = frozenset(os.environ[NAMES].split(","))
        self.version = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or answer it with 401; a websocket is closed."""
        if scope["type"] == "lifespan" or is_allowed(scope["headers"], self.token, self.names):
            await self._pass_on(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL.encode()})

    async def _pass_on(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, and name the version of the weights in the answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = b""
        if scope["path"] == RPC:
            body = await _body(receive)
            receive = _again(body, receive)
        loaded = _loaded(scope, body, self.version)
        before = self.version
        if loaded != before:
            self.version = ""  # until they are all there

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                if loaded != before and message["status"] == 200:
                    self.version = loaded
                version = self.version if self.version in (before, loaded) else ""
                header = (VERSION_HEADER.lower().encode(), version.encode())
                message = message | {"headers": [*message.get("headers", ()), header]}
            await send(message)

        await self.app(scope, receive, answer)


LARGEST = 2**20  # bytes of a call by RPC


async def _body(receive: Any) -> bytes:
    """Return a request's body. Raises ValueError for one of more than LARGEST bytes."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message["type"] == "http.request" and message.get("more_body", False)
        if len(body) > LARGEST:
            raise ValueError(f"a call of more than {LARGEST} bytes")
    return body


def _again(body: bytes, receive: Any) -> Callable[[], Awaitable[Any]]:
    """Return a ``receive`` that gives a body that was read already, then what follows."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return waiting.pop() if waiting else await receive()

    return again


def _loaded(scope: Any, body: bytes, version: str) -> str:
    """Return the version of the weights after a request that is answered with 200."""
    path = scope["path"]
    if scope["method"] == "GET" or path in HARMLESS or path.startswith(POLICIES):
        return version
    if path != RPC:
        return ""
    try:
        call = json.loads(body)
        method, arguments = call["method"], call.get("args") or []
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return ""
    if method in HARMLESS_METHODS:
        return version
    position = NAMING_METHODS.get(method, -1)
    known = len(arguments) == position + 1 and arguments and isinstance(arguments[position], str)
    return str(arguments[position]) if known else ""


REFUSAL = f"this server answers requests with its token ({TOKEN}) that name it as their host"


def is_allowed(headers: Headers, token: str, names: Collection[str]) -> bool:
    """Return whether a request has the token, once, and one of the server's names as its host.

    A page in a browser that resolves to the server's address still sends the page's own name.
    """
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    given = [value for name, value in headers if name == b"authorization"]
    if len(hosts) != 1 or len(given) != 1 or not _is_named(hosts[0], names):
        return False
    return hmac.compare_digest(given[0], f"Bearer {token}".encode())


def _is_named(host: str, names: Collection[str]) -> bool:
    """Return whether a Host header is one of ``names``, or an IP address, which no page has."""
    name, colon, port = host.lower().rpartition(":")
    name = name if colon and port.isdecimal() else host.lower()
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name in names
    return True


def server_token() -> str:
    """Return the token of a server that starts: of the environment, or the one in TOKEN_FILE.

    The file is made where it is missing, for this user alone. Raises PermissionError for a file
    that others may read, and ValueError for a token of fewer than SHORTEST characters.
    """
    if token := os.environ.get(TOKEN, "").strip():
        return _long_enough(token, TOKEN)
    if not TOKEN_FILE.exists():
        TOKEN_FILE.parent.mkdir(parents=True, exist_ok=True)
        partial = TOKEN_FILE.with_name(f".{TOKEN_FILE.name}.{os.getpid()}")
        partial.touch(mode=0o600, exist_ok=False)
        partial.write_text(secrets.token_urlsafe(32))
        partial.rename(TOKEN_FILE)
    if TOKEN_FILE.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise PermissionError(f"others may read {TOKEN_FILE}: remove it, and a new one is made")
    return _long_enough(TOKEN_FILE.read_text().strip(), str(TOKEN_FILE))


def _long_enough(token: str, location: str) -> str:
    if len(token.strip()) < SHORTEST:
        raise ValueError(
            f"the token in {location} has {len(token)} characters, and needs {SHORTEST}: remove "
            "it, and `make serve` makes one"
        )
    return token

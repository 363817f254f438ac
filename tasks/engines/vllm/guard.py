"""Answer only those who have the server's token; vLLM's server runs this before all else.

vLLM's own ``--api-key`` guards some prefixes of paths (``/v1``, ``/inference``), and none of the
calls that load weights, clear caches or put the server to sleep.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import stat
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path
from typing import Any

TOKEN = "BEAMLINE_SERVER_TOKEN"  # environment variable of the server, and of the runs that use it
NAMES = "BEAMLINE_SERVER_NAMES"  # environment variable: names of the server, by commas
TOKEN_FILE = Path(".beamline/server.token")
SHORTEST = 16  # characters of a token
App = Callable[[Any, Any, Any], Awaitable[None]]  # of ASGI
Headers = Iterable[tuple[bytes, bytes]]


class Guard:
    """An ASGI application before another one; a request that it refuses does not get there."""

    def __init__(self, app: App) -> None:
        """Guard ``app``.

        Raises KeyError without a token in the environment, and ValueError for a short one.
        """
        self.app, self.token = app, _long_enough(os.environ[TOKEN], TOKEN)
        self.names = frozenset(os.environ[NAMES].split(","))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or answer it with 401; a websocket is closed."""
        if scope["type"] == "lifespan" or is_allowed(scope["headers"], self.token, self.names):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL.encode()})


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
    if chosen := os.environ.get(TOKEN, "").strip():
        return _long_enough(chosen, TOKEN)
    if not TOKEN_FILE.exists():
        TOKEN_FILE.parent.mkdir(parents=True, exist_ok=True)
        partial = TOKEN_FILE.with_name(f".{TOKEN_FILE.name}.{os.getpid()}")
        partial.touch(mode=0o600, exist_ok=False)
        partial.write_text(secrets.token_urlsafe(32))
        partial.rename(TOKEN_FILE)
    if TOKEN_FILE.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise PermissionError(f"others may read {TOKEN_FILE}: remove it, and a new one is made")
    return _long_enough(TOKEN_FILE.read_text().strip(), str(TOKEN_FILE))


def _long_enough(token: str, place: str) -> str:
    if len(token.strip()) < SHORTEST:
        raise ValueError(
            f"the token in {place} has {len(token)} characters, and needs {SHORTEST}: remove it, "
            "and `make serve` makes one"
        )
    return token

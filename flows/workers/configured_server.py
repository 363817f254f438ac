"""Ask the server that PREFECT_API_URL names, before Prefect is imported, which takes seconds."""

from __future__ import annotations

import http.client
import json
import os
import urllib.request
from collections.abc import Mapping
from contextlib import closing
from typing import Any
from urllib.parse import SplitResult, urlsplit

from flows.host.addresses import without_password
from flows.host.plain_reasons import plain_reason
from params.schema.addresses import LOOPBACK

VARIABLE = "PREFECT_API_URL"
PARENT_TASK_RUN = "BEAMLINE_PARENT_TASK_RUN"  # environment variable: the stage's task in a retrain
CONNECT = 3.0  # seconds to accept a connection
ANSWER = 10.0  # seconds for one answer of a server that a run begins with; it may be loaded
LONGEST = 1000  # bytes of an answer that are read: those of a Prefect server have some ten
OWN_SERVER = f"or unset {VARIABLE}, and the run starts a server of its own"
NOT_PREFECT = "which is no Prefect server's API: correct it (http://host:port/api)"
# path -> the kind of what a Prefect server answers, as JSON
ROUTES: Mapping[str, type] = {"/health": bool, "/admin/version": str}


def check() -> None:
    """Raise ValueError where the environment names a server that a run cannot begin with.

    A stage of a run does without: its server may be restarted just now.
    """
    address = os.environ.get(VARIABLE)
    if address and PARENT_TASK_RUN not in os.environ and (reason := fault(address)):
        raise ValueError(refusal(address, reason))


def refusal(address: str, reason: str) -> str:
    """Return the message on a server that a run cannot begin with."""
    return without_password(f"{VARIABLE} is {address}, {reason}, {OWN_SERVER}")


def fault(address: str) -> str:
    """Return why a run cannot use a server, and what to do; "" where it can.

    "" also where only Prefect can tell: behind a proxy, over HTTPS, or with a login.
    """
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port
    except ValueError:  # a port that is no number
        host = ""
    if not host or parts.scheme not in ("http", "https") or not address.isprintable():
        return "which is no address of a server: write http://host:port/api"
    if parts.scheme == "https" or _has_proxy(host):
        return ""
    try:
        with closing(http.client.HTTPConnection(host, port, timeout=CONNECT)) as connection:
            connection.connect()
            connection.sock.settimeout(ANSWER)
            return next(filter(None, (_asked(connection, parts, path) for path in ROUTES)), "")
    except http.client.HTTPException:
        return NOT_PREFECT
    except (OSError, UnicodeError) as error:
        return f"which cannot be reached ({plain_reason(error)}): start that server"


def _has_proxy(host: str) -> bool:
    if host in LOOPBACK or urllib.request.proxy_bypass(host):
        return False
    return not urllib.request.getproxies().keys().isdisjoint(("http", "all"))


def _asked(connection: http.client.HTTPConnection, parts: SplitResult, path: str) -> str:
    """Return what is wrong with the answer at a path, and what to do; "" for nothing."""
    connection.request("GET", parts.path.rstrip("/") + path)
    response = connection.getresponse()
    content = response.read(LONGEST)
    if response.status >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
        return f"which answers with the status {response.status}: look at its log"
    if response.status == http.HTTPStatus.NOT_FOUND:
        return NOT_PREFECT
    if response.status != http.HTTPStatus.OK:  # a login, for one, which Prefect may have
        return ""
    return "" if isinstance(_parsed(content), ROUTES[path]) else NOT_PREFECT


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None

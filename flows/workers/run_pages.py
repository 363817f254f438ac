"""Serve the pages of runs beside Prefect's own, so that its artifacts can link to a question.

``/page/<run>`` is the file ``page.html`` that a run has kept in MLflow. It may come from another
checkout, so it is shown in a sandbox: its scripts can ask neither server.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

from flows.host.addresses import address_without_password
from flows.tracking import store

Application = Callable[[Any, Any, Any], Awaitable[None]]  # of ASGI

PATH = "/page/"
RUN = re.compile(r"/page/([0-9a-f]{32})")
ABOUT = b"pages of runs: /page/<id of the run in MLflow>\n"
SANDBOX = b"sandbox allow-scripts allow-popups allow-popups-to-escape-sandbox"
TIMEOUT = 5.0  # seconds for the answer of a server, where a link depends on it


def with_pages(app: Application) -> Application:
    """Return a server that serves the pages of runs, and else what ``app`` does."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not path.startswith(PATH):
            await app(scope, receive, send)
            return
        status, kind, body = await asyncio.to_thread(_page, path)
        headers = [(b"content-type", kind), (b"x-content-type-options", b"nosniff")]
        headers += [(b"content-security-policy", SANDBOX), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return answer


def _page(path: str) -> tuple[int, bytes, bytes]:
    """Return status, type and body of the answer for a path below PATH."""
    plain = b"text/plain; charset=utf-8"
    if path == PATH:
        return 200, plain, ABOUT
    named = RUN.fullmatch(path)
    try:
        page = store.artifact_of(named[1], "page.html") if named else None
    except ConnectionError as error:
        return 503, plain, f"{error}\n".encode()
    if page is None:
        text = "MLflow has no page of such a run; `beamline page <recipe>` writes it as a file\n"
        return 404, plain, text.encode()
    return 200, b"text/html; charset=utf-8", page


def server() -> str:
    """Return the address of the Prefect server of this process; "" where it has none."""
    from prefect.settings import PREFECT_API_URL

    return address_without_password((PREFECT_API_URL.value() or "").removesuffix("/api"))


def path_of(run: str | None) -> str:
    """Return where the Prefect server of this process serves a run's page, without its host.

    A tunnel may give the server another host. "" where it serves no such pages, or is away.
    """
    import httpx

    if not run or not server():
        return ""
    try:
        answer = httpx.get(server() + PATH, timeout=TIMEOUT)
    except httpx.HTTPError:
        return ""
    return PATH + run if answer.content == ABOUT else ""

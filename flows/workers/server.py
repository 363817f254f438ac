"""Start a Prefect server of this project, as a process of its own on loopback.

``python -m flows.workers.server serve DESCRIPTOR KIND`` is the server process.
"""

from __future__ import annotations

import asyncio
import gc
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from flows.host import empty_databases
from flows.host.addresses import address_without_password
from flows.host.parents import PARENT, die_with_parent
from flows.tracking.store import store_uri
from flows.workers.prefect_patches import begin_transactions_as_writes, settle_events
from flows.workers.run_pages import Application, with_pages

HOME = Path(".beamline/prefect")
HOST = "127.0.0.1"
PREFECT_PORT, MLFLOW_PORT = 4200, 5000  # of `make ui`, where they are free
LOOPBACK = frozenset({HOST, "localhost", "[::1]"})
HOSTS = "BEAMLINE_HOSTS"  # environment variable: more names that a server is opened by, by commas
NAMED = re.compile(r"(\[[0-9a-f:.]+\]|[^:/@\[\]]+)(:\d+)?")  # a Host header
START_TIMEOUT = 300.0  # seconds that a living server has to answer; a loaded machine takes 60
STOP_TIMEOUT = 10.0  # seconds that a server has to end
RESTARTS = 5  # of a run's own server
SHOWN = 80  # characters of a header in an answer


def ui_address() -> str:
    """Return the address of MLflow's UI: the store's server, or that of `make ui`."""
    uri = address_without_password(store_uri())
    return uri.rstrip("/") if uri.startswith("http") else f"http://{HOST}:{MLFLOW_PORT}"


@contextmanager
def own_server(meanwhile: Callable[[], object]) -> Iterator[str]:
    """Start a server that ends with this process, even a killed one; yield its API's address."""
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / "server.log").open("ab") as log:
        process, port = start_prefect("run", 0, log)
        run_ended = threading.Event()
        watcher = threading.Thread(target=_watch, args=(process, port, log, run_ended), daemon=True)
        watcher.start()
        try:
            meanwhile()
            await_answer(process, port, "/api/health", log.name)
            yield f"http://{HOST}:{port}/api"
        finally:
            run_ended.set()
            watcher.join()


def _watch(
    process: subprocess.Popen[bytes], port: int, log: IO[bytes], run_ended: threading.Event
) -> None:
    """Restart a server that ends by itself; stop it when the run has ended.

    What it had accepted is in its database, and clients retry until it answers. A thread that
    starts a process must outlive it, for the kernel counts the thread as the process's parent.
    """
    answered = False  # one that never answered is not restarted: it would fail again
    for _ in range(RESTARTS):
        while not run_ended.wait(0.2) and process.poll() is None:
            answered = answered or _answers(port)
        if run_ended.is_set() or not answered:
            break
        print("Prefect's server has ended by itself: restarting it", flush=True)
        process, _ = start_prefect("run", port, log)
    run_ended.wait()
    stop(process)


def _answers(port: int) -> bool:
    with closing(http.client.HTTPConnection(HOST, port, timeout=START_TIMEOUT)) as connection:
        try:
            connection.request("GET", "/api/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False


# ---------------------------------------------------------------- the server


def start_prefect(
    kind: str, port: int, log: IO[bytes] | int
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a server on ``port`` (0: a free one) for a "run" or for the "ui"; return both.

    The port is bound here, so that nobody else can take it, and a client that connects early waits
    instead of failing.
    """
    with socket.create_server((HOST, port)) as listening:
        port, descriptor = listening.getsockname()[1], listening.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.workers.server", "serve", str(descriptor), kind],
            env=_environment(kind, port),
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return process, port


def _environment(kind: str, port: int) -> dict[str, str]:
    """Return the environment of a server, whose store is the project's whatever the user's is."""
    home = HOME.absolute()
    services = "PREFECT_SERVER_SERVICES"
    settings = {
        PARENT: str(os.getpid()),
        "DO_NOT_TRACK": "1",
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(sorted(pages(port))),
        # relative to the server's working folder: a path may have a "?", which begins options
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{HOME / 'prefect.db'}",
        "PREFECT_SERVER_DATABASE_MIGRATE_ON_START": "false",  # _migrate does, and faster
        "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",  # where a page is read (run_pages.py)
        "PREFECT_UI_API_URL": "/api",  # of the page's own host: a tunnel may have another port
    }
    if kind == "run":  # nothing to react to, nothing to clean up within one run
        settings |= {f"{services}_{name}_ENABLED": "false" for name in ("TRIGGERS", "DB_VACUUM")}
    inherited = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    return inherited | settings


def await_answer(process: subprocess.Popen[bytes], port: int, path: str, log: str) -> None:
    """Wait until a server answers; RuntimeError where it ends or takes START_TIMEOUT seconds."""
    deadline = time.monotonic() + START_TIMEOUT
    while process.poll() is None and time.monotonic() < deadline:
        with closing(http.client.HTTPConnection(HOST, port, timeout=START_TIMEOUT)) as connection:
            try:
                connection.request("GET", path)
                if connection.getresponse().status == http.HTTPStatus.OK:
                    return
            except OSError:  # it does not listen yet, or it has just ended
                time.sleep(0.1)
    raise RuntimeError(f"the server on port {port} did not start: see {log}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a server and what it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            os.killpg(process.pid, signal.SIGCONT)  # one that is suspended would get no signal
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT)


def _serve(descriptor: int, kind: str) -> None:
    """Be a Prefect server on a bound socket until SIGTERM.

    Prefect's own command imports and checks more first.
    """
    die_with_parent()
    gc.disable()  # the imports make a million objects, and all of them stay
    import uvicorn
    from prefect.server.api.server import create_app

    class UvicornServer(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await settle_events(STOP_TIMEOUT / 2)
            await super().shutdown(sockets)

    begin_transactions_as_writes()
    _migrate()
    listening = socket.socket(fileno=descriptor)
    app = for_own_pages(with_pages(create_app(ephemeral=kind == "run")))
    config = uvicorn.Config(app, log_level="error")
    gc.enable()
    gc.freeze()
    UvicornServer(config).run(sockets=[listening])


def pages(port: int) -> set[str]:
    """Return the origins of a server's own pages."""
    return {f"http://{name}:{port}" for name in (HOST, "localhost")}


def for_own_pages(app: Application) -> Application:
    """Return a server that answers pages of other origins, and requests for other hosts, with 403.

    Prefect asks nobody who they are, so a page in a browser on this machine could start flow runs.
    Programs send no Origin. A page whose name resolves to loopback sends its own name as the host.
    """
    more = os.environ.get(HOSTS, "").lower().split(",")
    names = LOOPBACK | {name.strip() for name in more if name.strip()}

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        sent = scope.get("headers", [])
        fault = "" if scope["type"] == "lifespan" else _refusal(sent, names)
        if not fault:
            await app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            plain = [(b"content-type", b"text/plain"), (b"x-content-type-options", b"nosniff")]
            await send({"type": "http.response.start", "status": 403, "headers": plain})
            await send({"type": "http.response.body", "body": fault.encode()})

    return answer


def _refusal(headers: Iterable[tuple[bytes, bytes]], names: Collection[str]) -> str:
    """Return why a request is refused; "" if it is not.

    Its host must be one of ``names``, with any port: a tunnel may have another one. A page must be
    of the very host and port that it asks: other programs serve pages on loopback, too.
    """
    sent = [(name, value.decode("latin-1").lower()) for name, value in headers]
    hosts = [value for name, value in sent if name == b"host"]
    named = NAMED.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if not named or named[1] not in names:
        return (
            f"this server does not answer for the host {ascii(', '.join(hosts))[:SHOWN]}: open it "
            f"as localhost, or start it with the host's name in {HOSTS}\n"
        )
    allowed = {f"http://{hosts[0]}", f"https://{hosts[0]}"}
    if others := [value for name, value in sent if name == b"origin" and value not in allowed]:
        return (
            f"a page of {ascii(others[0])[:SHOWN]} may not ask this server, {hosts[0]}: open the "
            "server's own pages\n"
        )
    return ""


def _migrate() -> None:
    """Bring the database up to date; a new one starts as a copy of an empty one."""
    from prefect.server.database import provide_database_interface

    database = HOME / "prefect.db"
    known = database.exists() or empty_databases.take("prefect", database)
    asyncio.run(provide_database_interface().create_db())
    if not known:
        empty_databases.keep("prefect", database)


if __name__ == "__main__":
    _, descriptor, kind = sys.argv[1:]  # serve DESCRIPTOR KIND
    _serve(int(descriptor), kind)

"""A Prefect server of this project, as a process of its own on loopback.

``python -m flows.workers.server serve DESCRIPTOR KIND`` is the server process.
"""

from __future__ import annotations

import asyncio
import gc
import http.client
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib.metadata import version as version_of
from pathlib import Path
from typing import IO

from flows.runs.dvc_command import PARENT, die_with_parent
from flows.workers.prefect_patches import HOME, STOP, settle_events

HOST = "127.0.0.1"
PREFECT_PORT, MLFLOW_PORT = 4200, 5000  # of `make ui`, where they are free
START = 60.0  # seconds that a server has to answer
RESTARTS = 5  # of a run's own server


@contextmanager
def own_server(meanwhile: Callable[[], object]) -> Iterator[str]:
    """A server of one's own, which dies with this process even where that is killed."""
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / "server.log").open("ab") as log:
        process, port = start_prefect("run", 0, log)
        over = threading.Event()
        keeper = threading.Thread(target=_keep, args=(process, port, log, over), daemon=True)
        keeper.start()
        try:
            meanwhile()
            await_answer(process, port, "/api/health", log.name)
            yield f"http://{HOST}:{port}/api"
        finally:
            over.set()
            keeper.join()


def _keep(
    process: subprocess.Popen[bytes], port: int, log: IO[bytes], over: threading.Event
) -> None:
    """Start a server again where it ends by itself; end it when the run is ``over``.

    What it had taken is in its database, and clients ask again until it answers. A thread that
    starts a process must outlive it, for the kernel counts the thread as the process's parent.
    """
    answered = False  # one that never did is not started again: it would not either
    for _ in range(RESTARTS):
        while not over.wait(0.2) and process.poll() is None:
            answered = answered or _answers(port)
        if over.is_set() or not answered:
            break
        print("Prefect's server has ended by itself: it is started again", flush=True)
        process, _ = start_prefect("run", port, log)
    over.wait()
    stop(process)


def _answers(port: int) -> bool:
    with closing(http.client.HTTPConnection(HOST, port, timeout=START)) as connection:
        try:
            connection.request("GET", "/api/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False


# ---------------------------------------------------------------- the server


def start_prefect(
    kind: str, port: int, log: IO[bytes] | int
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a server on ``port`` (0: a free one) for a "run" or for the "ui"; process and port.

    The port is bound here, so nobody can take it, and who connects early waits instead of failing.
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
    """The environment of a server: its store is the project's, whatever the user has configured."""
    home = HOME.absolute()
    services = "PREFECT_SERVER_SERVICES"
    settings = {
        PARENT: str(os.getpid()),
        "DO_NOT_TRACK": "1",
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home / 'prefect.db'}",
        "PREFECT_SERVER_DATABASE_MIGRATE_ON_START": "false",  # _migrate does, and faster
        "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
        "PREFECT_UI_API_URL": f"http://{HOST}:{port}/api",
    }
    if kind == "run":  # nothing to react to, nothing to clean up within one run
        settings |= {f"{services}_{name}_ENABLED": "false" for name in ("TRIGGERS", "DB_VACUUM")}
    inherited = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    return inherited | settings


def await_answer(process: subprocess.Popen[bytes], port: int, path: str, log: str) -> None:
    deadline = time.monotonic() + START
    while process.poll() is None and time.monotonic() < deadline:
        with closing(http.client.HTTPConnection(HOST, port, timeout=START)) as connection:
            try:
                connection.request("GET", path)
                if connection.getresponse().status == http.HTTPStatus.OK:
                    return
            except OSError:  # it does not listen yet, or it has just ended
                time.sleep(0.1)
    raise RuntimeError(f"the server on port {port} did not start: {log} says why")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and what it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP)


def _serve(descriptor: int, kind: str) -> None:
    """Be a Prefect server on a bound socket until SIGTERM.

    Prefect's own command imports and checks more first. Its server answers a write that meets
    another one with an error, upon which the client waits for two seconds or more; a transaction
    that begins as a write waits for its turn instead, some milliseconds.
    """
    die_with_parent()
    gc.disable()  # the imports make a million objects, and all of them stay
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.server.database.configurations import AioSqliteConfiguration as Sqlite

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await settle_events()
            await super().shutdown(sockets)

    begin = Sqlite.begin_transaction
    Sqlite.begin_transaction = lambda self, session, **_: begin(self, session, with_for_update=True)  # type: ignore[method-assign]
    _migrate()
    config = uvicorn.Config(create_app(ephemeral=kind == "run"), log_level="error")
    gc.enable()
    gc.freeze()
    Server(config).run(sockets=[socket.socket(fileno=descriptor)])


def _migrate() -> None:
    """Bring the database up to date; a new one starts as a copy of an empty one.

    The migrations of a new database take 4 s. The empty one is kept in the virtual environment.
    """
    from prefect.server.database import provide_database_interface

    database = HOME / "prefect.db"
    empty = Path(sys.prefix) / f"prefect-{version_of('prefect')}-empty.db"
    new = not database.exists()
    if new and empty.exists():
        _copy_database(empty, database)
    asyncio.run(provide_database_interface().create_db())
    if new and not empty.exists():
        with suppress(OSError):
            _copy_database(database, empty)


def _copy_database(source: Path, target: Path) -> None:
    """Copy a SQLite database; one that lies there already stays."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        copy = Path(folder) / "copy.db"
        with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(copy)) as new:
            old.backup(new)
        with suppress(FileExistsError):
            os.link(copy, target)


if __name__ == "__main__":
    _, descriptor, kind = sys.argv[1:]  # serve DESCRIPTOR KIND
    _serve(int(descriptor), kind)

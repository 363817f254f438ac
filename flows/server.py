"""The Prefect server of a run: the configured one, that of ``make ui``, or one of the run's own.

A run's own server keeps its database in ``.beamline/prefect``, so that ``make ui`` shows the run
later. Started as a program, this module is ``make ui``, or the server itself. Prefect is imported
where it is needed: whether there is work to do is settled without it.

A server that goes away never ends a run: the ledger is the truth about sub-steps. The run's own is
started again at the same address; for another one the run waits a bounded time, does without it,
and says so once. Events of task runs wait in memory, ends of flow runs in ``.beamline/prefect``.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import http.client
import json
import logging
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
from contextlib import closing, contextmanager, nullcontext, suppress
from importlib.metadata import version as version_of
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tasks import processes, track
from tasks.version import PARENT, die_with_parent

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun
    from prefect.states import State

HOME = Path(".beamline/prefect")
UI_ADDRESS = HOME / "ui.address"  # locked by the `make ui` that wrote it, for as long as it runs
HOST = "127.0.0.1"
PREFECT_PORT, MLFLOW_PORT = 4200, 5000  # of `make ui`, where they are free
START = 60.0  # seconds that a server has to answer
STOP = 10.0  # seconds that a server has to end
PATIENCE = 30.0  # seconds that a stage waits for the server of the run that it belongs to
RETRIES = 4  # of a call to a server that has answered before, after 2 s, 4 s, 8 s, 16 s
RESTARTS = 5  # of a run's own server
RECONNECTIONS = 20  # attempts, a second apart, that an event waits for; Prefect itself: 10
PARENT_TASK_RUN = "BEAMLINE_PARENT_TASK_RUN"  # environment variable: the stage's task in a retrain
UNTOLD = HOME / "untold"  # the ends of flow runs that no server has taken yet

# ---------------------------------------------------------------- for runs


@contextmanager
def prefect_server(meanwhile: Callable[[], object] = lambda: None) -> Iterator[str]:
    """Address of the API that this process and its children report to while the block lasts.

    ``meanwhile`` is called while a server of one's own starts, which takes 3 s. Raises RuntimeError
    for a server that does not answer.
    """
    found = _configured() or _of_ui()
    with nullcontext(found) if found else _own(meanwhile) as address:
        tell_untold(address)
        with _reporting_to(address):
            yield address


def _configured() -> str | None:
    """PREFECT_API_URL of the environment or of the active profile, if it answers.

    None also where it is that of the run this stage belongs to, and has gone away since: the stage
    then has a server, and a flow run, of its own.
    """
    from prefect.settings import PREFECT_API_URL

    address = PREFECT_API_URL.value()
    if address is None:
        return None
    inner = PARENT_TASK_RUN in os.environ
    error = _silence(PATIENCE if inner else 0.0)
    if error and not inner:
        raise RuntimeError(
            f"PREFECT_API_URL is {address}, which does not answer ({error}): start that "
            "server, or unset PREFECT_API_URL, and the run starts a server of its own"
        )
    if error:
        del os.environ[PARENT_TASK_RUN]
        print(f"Prefect's server {address} is away: this stage starts one of its own", flush=True)
        return None
    return address


def answering() -> str | None:
    """The server that runs of this checkout would find now; None where each has its own."""
    from prefect.settings import PREFECT_API_URL

    configured = PREFECT_API_URL.value()
    return _of_ui() if configured is None or _silence(0.0) else configured


def _silence(patience: float) -> Exception | None:
    """Why the configured server does not answer within ``patience`` seconds; None if it does."""
    from prefect.client.orchestration import get_client

    deadline = time.monotonic() + patience
    with get_client(sync_client=True) as client:
        while (error := client.api_healthcheck()) and time.monotonic() < deadline:
            time.sleep(0.5)
    return error


def _of_ui() -> str | None:
    """Address of the server of a `make ui` that is running here."""
    if not UI_ADDRESS.exists():
        return None
    with UI_ADDRESS.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read() or None  # nothing yet: it is starting
    return None


@contextmanager
def _own(meanwhile: Callable[[], object]) -> Iterator[str]:
    """A server of one's own, which dies with this process even where that is killed."""
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / "server.log").open("ab") as log:
        process, port = _start_prefect("run", 0, log)
        over = threading.Event()
        keeper = threading.Thread(target=_keep, args=(process, port, log, over), daemon=True)
        keeper.start()
        try:
            meanwhile()
            _await_answer(process, port, "/api/health", log.name)
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
        process, _ = _start_prefect("run", port, log)
    over.wait()
    _stop(process)


def _answers(port: int) -> bool:
    with closing(http.client.HTTPConnection(HOST, port, timeout=START)) as connection:
        try:
            connection.request("GET", "/api/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False


@contextmanager
def _reporting_to(address: str) -> Iterator[None]:
    """Point Prefect, which has read its settings when it was imported, to a server."""
    from prefect.context import refresh_global_settings_context
    from prefect.logging.handlers import APILogWorker
    from prefect.settings import get_current_settings, temporary_settings

    before = os.environ.get("PREFECT_API_URL")
    os.environ["PREFECT_API_URL"] = address
    refresh_global_settings_context()
    _keep_to_the_ui()
    flows = get_current_settings().flows
    # the thread that sends heartbeats holds up the end of every flow run by a second
    beat = flows.heartbeat_frequency if "heartbeat_frequency" in flows.model_fields_set else None
    changes = {"flows.heartbeat_frequency": beat, "client.max_retries": RETRIES}
    try:
        with _patient(), temporary_settings(changes), _enduring(address):
            yield
    finally:
        APILogWorker.drain_all(timeout=STOP)
        os.environ.pop("PREFECT_API_URL")
        if before is not None:
            os.environ["PREFECT_API_URL"] = before
        refresh_global_settings_context()


@contextmanager
def _patient() -> Iterator[None]:
    """Events wait for a server that is away, but not each of them.

    The first that meets none has RECONNECTIONS attempts, each later one has a single attempt until
    one is taken. Prefect sends what was not taken along with the next that is. It takes no client
    of another class.
    """
    from prefect.events.clients import PrefectEventsClient
    from prefect.events.worker import EventsWorker

    emit, attach = PrefectEventsClient._emit, EventsWorker.attach_related_resources_from_context

    async def attach_what_is_told(self: Any, event: Any) -> None:
        with suppress(Exception):
            if self._client._reconnection_attempts:  # else the server would be asked in vain
                await attach(self, event)

    async def emit_patiently(self: Any, event: Any) -> None:
        try:
            await emit(self, event)
            self._reconnection_attempts = RECONNECTIONS
        except Exception:  # the event is kept with those to be sent again
            self._reconnection_attempts = 0

    EventsWorker.set_client_override(PrefectEventsClient, reconnection_attempts=RECONNECTIONS)
    PrefectEventsClient._emit = emit_patiently  # type: ignore[method-assign]
    EventsWorker.attach_related_resources_from_context = attach_what_is_told  # type: ignore[method-assign]
    try:
        yield
    finally:
        EventsWorker.set_client_override(None)
        EventsWorker.drain_all(timeout=STOP)
        PrefectEventsClient._emit = emit  # type: ignore[method-assign]
        EventsWorker.attach_related_resources_from_context = attach  # type: ignore[method-assign]


def _keep_to_the_ui() -> None:
    """Leave the terminal to progress bars: what flow and task runs log goes to the UI alone."""
    if "PREFECT_LOGGING_LEVEL" in os.environ:
        return
    logging.getLogger("prefect").setLevel(logging.WARNING)
    logging.getLogger("EventsWorker").setLevel(logging.ERROR)  # counts what is left to send
    for name in ("prefect.events.clients", "prefect._internal.concurrency"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # say of each event that it must wait
    logging.raiseExceptions = False  # or each log that cannot be sent is a line in the terminal
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False


@contextmanager
def _enduring(address: str) -> Iterator[None]:
    """Flow runs begin and end though the server has gone away; what it missed is kept for it."""
    import httpx
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas import responses
    from prefect.exceptions import ObjectNotFound

    report = SyncPrefectClient.set_flow_run_state

    def endure(self: Any, flow_run_id: Any, state: State[Any], force: bool = False) -> Any:
        try:
            return report(self, flow_run_id, state, force)
        except (httpx.HTTPError, ObjectNotFound) as error:
            print(
                f"Prefect's server {address} does not take the state {state.name} of a flow run "
                f"({error}): the run goes on; a later call tells it how it ended",
                file=sys.stderr,
            )
            _keep_untold(address, str(flow_run_id), state)
            return responses.OrchestrationResult[Any](
                state=state,
                status=responses.SetStateStatus.ACCEPT,
                details=responses.StateAcceptDetails(),
            )

    SyncPrefectClient.set_flow_run_state = endure  # type: ignore[method-assign]
    try:
        yield
    finally:
        SyncPrefectClient.set_flow_run_state = report  # type: ignore[method-assign]


def _keep_untold(address: str, flow_run: str, state: State[Any]) -> None:
    """Keep how a flow run has ended; no other state is worth telling later."""
    if not state.is_final():
        return
    said = {"address": address, "type": state.type.value, "name": state.name}
    UNTOLD.mkdir(parents=True, exist_ok=True)
    partial = UNTOLD / f".{flow_run}.partial"
    partial.write_text(json.dumps(said))
    partial.rename(UNTOLD / f"{flow_run}.json")


def tell_untold(address: str) -> int:
    """Tell a server how those flow runs ended that it did not hear of; how many it took."""
    if not UNTOLD.exists():
        return 0
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.exceptions import ObjectNotFound
    from prefect.states import State

    told = 0
    with SyncPrefectClient(address) as client:
        for file in sorted(UNTOLD.glob("*.json")):
            said = json.loads(file.read_text())
            state: State[Any] = State(type=said["type"], name=said["name"])
            try:
                client.set_flow_run_state(file.stem, state, force=True)
            except ObjectNotFound:
                if said["address"] != address:  # another server's; this one has forgotten it
                    continue
            except Exception:
                return told
            file.unlink(missing_ok=True)
            told += 1
    return told


def name_process(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Tell Prefect which process a flow run is in: a hook for ``on_running`` (see flows/doctor)."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, infrastructure_pid=f"{processes.host()}:{os.getpid()}")


# ---------------------------------------------------------------- the server


def _start_prefect(
    kind: str, port: int, log: IO[bytes] | int
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a server on ``port`` (0: a free one) for a "run" or for the "ui"; process and port.

    The port is bound here, so nobody can take it, and who connects early waits instead of failing.
    """
    with socket.create_server((HOST, port)) as listening:
        port, descriptor = listening.getsockname()[1], listening.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.server", "serve", str(descriptor), kind],
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


def _await_answer(process: subprocess.Popen[bytes], port: int, path: str, log: str) -> None:
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


def _stop(process: subprocess.Popen[bytes]) -> None:
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
            await _settle()
            await super().shutdown(sockets)

    begin = Sqlite.begin_transaction
    Sqlite.begin_transaction = lambda self, session, **_: begin(self, session, with_for_update=True)  # type: ignore[method-assign]
    _migrate()
    config = uvicorn.Config(create_app(ephemeral=kind == "run"), log_level="error")
    gc.enable()
    gc.freeze()
    Server(config).run(sockets=[socket.socket(fileno=descriptor)])


async def _settle() -> None:
    """Wait until the events that clients have sent are in the database: task runs are made of them.

    On its own, the server drops at its end what it has not worked off.
    """
    from prefect.server.utilities.messaging.memory import METRICS

    calm = 0
    before: dict[str, int] = {}
    deadline = time.monotonic() + STOP / 2
    while calm < 3 and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        now = dict(METRICS["events"])
        calm = calm + 1 if now == before and now["published"] == now["consumed"] else 0
        before = now


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


# ---------------------------------------------------------------- make ui


def ui() -> int:
    """Show the runs of this project, in Prefect's UI and in MLflow's, until Ctrl-C."""
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # flows/__init__.py has set it aside
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    HOME.mkdir(parents=True, exist_ok=True)
    with UI_ADDRESS.open("a+") as address, (HOME / "ui.log").open("ab") as log:
        try:
            fcntl.flock(address, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"make ui: it runs already, see {_of_ui()}", file=sys.stderr)
            return 1
        address.truncate(0)
        started: list[subprocess.Popen[bytes]] = []
        try:
            return _show(address, log, started)
        except KeyboardInterrupt:
            return 0
        finally:
            for process in started:
                _stop(process)


def _show(address: IO[str], log: IO[bytes], started: list[subprocess.Popen[bytes]]) -> int:
    port, mlflow_port = _free(PREFECT_PORT), _free(MLFLOW_PORT)
    prefect, _ = _start_prefect("ui", port, log)
    started.append(prefect)
    mlflow = _start_mlflow(mlflow_port, log)
    started.append(mlflow)
    _await_answer(prefect, port, "/api/health", log.name)
    address.write(f"http://{HOST}:{port}/api")
    address.flush()
    print(f"Prefect  http://{HOST}:{port}")
    _await_answer(mlflow, mlflow_port, "/health", log.name)
    print(f"MLflow   http://{HOST}:{mlflow_port}\nCtrl-C ends both.", flush=True)
    while prefect.poll() is None and mlflow.poll() is None:
        time.sleep(0.5)
    raise RuntimeError(f"a server has ended by itself: {log.name} says why")


def _free(port: int) -> int:
    """``port``, or the next one that nobody listens on."""
    with suppress(OSError), socket.create_server((HOST, port)):
        return port
    return _free(port + 1)


def _start_mlflow(port: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", track.store_uri()]
    return subprocess.Popen(
        [*command, "--host", HOST, "--port", str(port), "--workers", "1"],
        env=os.environ
        | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        | {PARENT: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def main(arguments: list[str]) -> int:
    """``serve <descriptor> <kind>`` is a server, nothing is `make ui`."""
    if arguments[:1] == ["serve"]:
        _serve(int(arguments[1]), arguments[2])
        return 0
    try:
        return ui()
    except RuntimeError as error:
        print(f"make ui: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Connect this process to a Prefect server: the configured one, that of `make ui`, or its own."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from flows.host import files, processes
from flows.host.addresses import address_without_password, without_password
from flows.tracking import outbox
from flows.tracking.outbox import OutboxMessage
from flows.workers.prefect_patches import queue_events, survive_outages
from flows.workers.server import HOME, STOP_TIMEOUT, own_server

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun
    from prefect.states import State

UI_ADDRESS = HOME / "ui.address"  # locked by the `make ui` that wrote it, for as long as it runs
PATIENCE = 30.0  # seconds that a stage waits for the server of the run that it belongs to
RETRIES = 4  # of a call to a server that has answered before, after 2 s, 4 s, 8 s, 16 s
PARENT_TASK_RUN = "BEAMLINE_PARENT_TASK_RUN"  # environment variable: the stage's task in a retrain


@contextmanager
def prefect_server(meanwhile: Callable[[], object] = lambda: None) -> Iterator[str]:
    """Have this process and its children report to a server; yield the address of its API.

    ``meanwhile`` is called while a server of one's own starts, which takes 3 s. Raises RuntimeError
    for a server that does not answer.
    """
    known_address = _configured() or ui_server()
    with nullcontext(known_address) if known_address else own_server(meanwhile) as address:
        send_unsent_ends(address)
        with _reporting_to(address):
            yield address


def _configured() -> str | None:
    """Return PREFECT_API_URL of the environment or of the active profile; None where it is unset.

    None also where it is the server of the run that this stage belongs to, and that server has
    become unreachable: the stage then has a server, and a flow run, of its own.
    """
    from prefect.settings import PREFECT_API_URL

    address = PREFECT_API_URL.value()
    if address is None:
        return None
    belongs_to_run = PARENT_TASK_RUN in os.environ
    error = _health_error(PATIENCE if belongs_to_run else 0.0)
    if error and not belongs_to_run:
        failed = without_password(f"{address}, which does not answer ({error})")
        raise RuntimeError(
            f"PREFECT_API_URL is {failed}: start that server, or unset PREFECT_API_URL, and the "
            "run starts a server of its own"
        )
    if error:
        del os.environ[PARENT_TASK_RUN]
        print(
            f"Prefect's server {address_without_password(address)} is unreachable: this stage "
            "starts one of its own",
            flush=True,
        )
        return None
    return address


def current_server() -> str | None:
    """Return the server that a run of this checkout would use now; None where it has its own."""
    from prefect.settings import PREFECT_API_URL

    configured = PREFECT_API_URL.value()
    return ui_server() if configured is None or _health_error(0.0) else configured


def _health_error(patience: float) -> Exception | None:
    """Check the configured server for ``patience`` seconds; return the error, or None."""
    from prefect.client.orchestration import get_client

    deadline = time.monotonic() + patience
    with get_client(sync_client=True) as client:
        while (error := client.api_healthcheck()) and time.monotonic() < deadline:
            time.sleep(0.5)
    return error


def ui_server() -> str | None:
    """Return the address of the server of a `make ui` that is running here, if one is."""
    if not UI_ADDRESS.exists():
        return None
    with UI_ADDRESS.open() as file:
        return (file.read() or None) if files.is_locked(file) else None  # empty while it starts


@contextmanager
def _reporting_to(address: str) -> Iterator[None]:
    """Point Prefect, which has read its settings when it was imported, to a server."""
    from prefect.context import refresh_global_settings_context
    from prefect.logging.handlers import APILogWorker
    from prefect.settings import get_current_settings, temporary_settings

    before = os.environ.get("PREFECT_API_URL")
    os.environ["PREFECT_API_URL"] = address
    if before != address:  # it takes a fifth of a second
        refresh_global_settings_context()
    _keep_logs_off_terminal()
    flows = get_current_settings().flows
    # the thread that sends heartbeats delays the end of every flow run by a second
    beat = flows.heartbeat_frequency if "heartbeat_frequency" in flows.model_fields_set else None
    changes = {"flows.heartbeat_frequency": beat, "client.max_retries": RETRIES}
    on_error = partial(_queue_end, address)
    try:
        with queue_events(STOP_TIMEOUT), temporary_settings(changes), survive_outages(on_error):
            yield
    finally:
        APILogWorker.drain_all(timeout=STOP_TIMEOUT)
        if before != address:
            os.environ.pop("PREFECT_API_URL")
            if before is not None:
                os.environ["PREFECT_API_URL"] = before
            refresh_global_settings_context()


def _keep_logs_off_terminal() -> None:
    """Leave the terminal to progress bars: logs of flow and task runs go to the UI alone."""
    if "PREFECT_LOGGING_LEVEL" in os.environ:
        return
    logging.getLogger("prefect").setLevel(logging.WARNING)
    logging.getLogger("EventsWorker").setLevel(logging.ERROR)  # counts the events left to send
    for name in ("prefect.events.clients", "prefect._internal.concurrency"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # one line for each queued event
    logging.raiseExceptions = False  # or each log that cannot be sent is a line in the terminal
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False


# ---------------------------------------------------------------- ends of flow runs


def _queue_end(address: str, flow_run: str, state: State[Any], error: Exception) -> None:
    """Queue the end of a flow run for a later call to send; other states are not worth it."""
    shown = address_without_password(address)
    print(
        f"Prefect's server {shown} did not accept the state {state.name} of a flow run "
        f"({without_password(str(error))}): the run goes on, and a later call sends how it ended",
        file=sys.stderr,
    )
    if state.is_final():
        end = {"flow_run": flow_run, "address": shown}
        end |= {"type": state.type.value, "name": state.name or state.type.value}
        with suppress(OSError):  # a full disk
            outbox.flow_runs().add(OutboxMessage("flow_run_end", end))


def send_unsent_ends(address: str) -> int:
    """Send queued ends of flow runs to a server; return how many it accepted."""
    unsent = outbox.flow_runs().files()
    if not unsent:
        return 0
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.exceptions import ObjectNotFound
    from prefect.states import State

    sent, shown = 0, address_without_password(address)
    with SyncPrefectClient(address) as client:
        for file in unsent:
            end = outbox.read(file).fields
            state: State[Any] = State(type=end["type"], name=end["name"])
            try:
                client.set_flow_run_state(end["flow_run"], state, force=True)
            except ObjectNotFound:
                if end["address"] != shown:  # it belongs to another server
                    continue
            except Exception:
                return sent
            file.unlink(missing_ok=True)
            sent += 1
    return sent


def name_process(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Log to Prefect which process runs a flow: a hook for ``on_running``, for the doctor."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, infrastructure_pid=f"{processes.host()}:{os.getpid()}")

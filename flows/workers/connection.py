"""Connect this process to a Prefect server: the configured one, that of `make ui`, or its own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from flows.host import files, processes

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun
    from prefect.states import State
from flows.workers.prefect_patches import (
    HOME,
    STOP,
    UNTOLD,
    log_to_ui_only,
    queue_events,
    survive_outages,
)
from flows.workers.server import own_server

UI_ADDRESS = HOME / "ui.address"  # locked by the `make ui` that wrote it, for as long as it runs
PATIENCE = 30.0  # seconds that a stage waits for the server of the run that it belongs to
RETRIES = 4  # of a call to a server that has answered before, after 2 s, 4 s, 8 s, 16 s
PARENT_TASK_RUN = "BEAMLINE_PARENT_TASK_RUN"  # environment variable: the stage's task in a retrain

# ---------------------------------------------------------------- for runs


@contextmanager
def prefect_server(meanwhile: Callable[[], object] = lambda: None) -> Iterator[str]:
    """Address of the API that this process and its children report to while the block lasts.

    ``meanwhile`` is called while a server of one's own starts, which takes 3 s. Raises RuntimeError
    for a server that does not answer.
    """
    found = _configured() or ui_server()
    with nullcontext(found) if found else own_server(meanwhile) as address:
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
    return ui_server() if configured is None or _silence(0.0) else configured


def _silence(patience: float) -> Exception | None:
    """Why the configured server does not answer within ``patience`` seconds; None if it does."""
    from prefect.client.orchestration import get_client

    deadline = time.monotonic() + patience
    with get_client(sync_client=True) as client:
        while (error := client.api_healthcheck()) and time.monotonic() < deadline:
            time.sleep(0.5)
    return error


def ui_server() -> str | None:
    """Address of the server of a `make ui` that is running here."""
    if not UI_ADDRESS.exists():
        return None
    with UI_ADDRESS.open() as file:
        # nothing yet: it is starting
        return (file.read() or None) if files.is_locked(file) else None


@contextmanager
def _reporting_to(address: str) -> Iterator[None]:
    """Point Prefect, which has read its settings when it was imported, to a server."""
    from prefect.context import refresh_global_settings_context
    from prefect.logging.handlers import APILogWorker
    from prefect.settings import get_current_settings, temporary_settings

    before = os.environ.get("PREFECT_API_URL")
    os.environ["PREFECT_API_URL"] = address
    refresh_global_settings_context()
    log_to_ui_only()
    flows = get_current_settings().flows
    # the thread that sends heartbeats holds up the end of every flow run by a second
    beat = flows.heartbeat_frequency if "heartbeat_frequency" in flows.model_fields_set else None
    changes = {"flows.heartbeat_frequency": beat, "client.max_retries": RETRIES}
    try:
        with queue_events(), temporary_settings(changes), survive_outages(address):
            yield
    finally:
        APILogWorker.drain_all(timeout=STOP)
        os.environ.pop("PREFECT_API_URL")
        if before is not None:
            os.environ["PREFECT_API_URL"] = before
        refresh_global_settings_context()


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

"""Connect this process to a Prefect server: the configured one, that of `make ui`, or its own."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from flows.host import files, processes
from flows.host.addresses import address_without_password, without_password
from flows.host.plain_reasons import plain_reason
from flows.tracking import outbox
from flows.tracking.outbox import OutboxMessage
from flows.workers import configured_server
from flows.workers.configured_server import ANSWER, PARENT_TASK_RUN
from flows.workers.outages import AwayError, PrefectServer, bounded, noted
from flows.workers.prefect_patches import queue_events, survive_outages
from flows.workers.server import HOME, STOP_TIMEOUT, own_server

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun
    from prefect.states import State

UI_ADDRESS = HOME / "ui.address"  # locked by the `make ui` that wrote it, for as long as it runs
AWAY_TIMEOUT = 0.5  # seconds for what is still queued for a server that is away


@contextmanager
def prefect_server(meanwhile: Callable[[], object] = lambda: None) -> Iterator[PrefectServer]:
    """Have this process and its children report to a server; yield it.

    It may be away, now or later (flows/workers/outages.py): what needs it then fails at once with
    AwayError. ``meanwhile`` is called while a server of one's own starts, which takes 3 s. Raises
    RuntimeError for a server that does not answer a run that begins.
    """
    with noted(HOME) as note:
        of_run = _server_of_run()
        known_address = of_run or _configured() or _ui_server_that_answers()
        with nullcontext(known_address) if known_address else own_server(meanwhile) as address:
            server = PrefectServer(address, note)
            if not of_run:
                send_unsent_ends(address)
            with _reporting_to(server):
                if of_run:
                    _ask(server)
                yield server


def _server_of_run() -> str | None:
    """Return the address of the server of the run that this stage belongs to; None without one."""
    from prefect.settings import PREFECT_API_URL

    return PREFECT_API_URL.value() if PARENT_TASK_RUN in os.environ else None


def _ask(server: PrefectServer) -> None:
    """Wait for the server of a run, which may be restarted just now, or give it up."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        client.api_healthcheck()  # returns what went wrong, which the server has noted
    if not server.is_away:
        send_unsent_ends(server.address)


def _configured() -> str | None:
    """Return PREFECT_API_URL of the environment or of the active profile; None where it is unset.

    Raises RuntimeError where it does not answer.
    """
    from prefect.settings import PREFECT_API_URL

    address = PREFECT_API_URL.value()
    if address and (reason := _fault(address)):
        raise RuntimeError(configured_server.refusal(address, reason))
    return address


def current_server() -> str | None:
    """Return the server that a run of this checkout would use now; None where it has its own."""
    from prefect.settings import PREFECT_API_URL

    configured = PREFECT_API_URL.value()
    return ui_server() if configured is None or _fault(configured) else configured


def _fault(address: str) -> str:
    """Return why a configured server cannot be used, and what to do; "" where it can."""
    if reason := configured_server.fault(address):
        return reason
    if error := _health_error(address):
        return f"which cannot be reached ({plain_reason(error)}): start that server"
    return ""


def _health_error(address: str) -> Exception | None:
    """Return why a server does not answer, or None."""
    with _asking_once(address) as client:
        error: Exception | None = client.api_healthcheck()
    return error


@contextmanager
def _asking_once(address: str) -> Iterator[SyncPrefectClient]:
    """Yield a client that does not repeat what fails, with ANSWER seconds for each answer."""
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.settings import PREFECT_API_KEY, get_current_settings, temporary_settings

    secret = get_current_settings().api.auth_string
    auth = secret.get_secret_value() if secret else None
    settings = {"timeout": ANSWER}
    with (
        temporary_settings({"client.max_retries": 0}),
        SyncPrefectClient(
            address, auth_string=auth, api_key=PREFECT_API_KEY.value(), httpx_settings=settings
        ) as client,
    ):
        yield client


def ui_server() -> str | None:
    """Return the address of the server of a `make ui` that is running here, if one is."""
    if not UI_ADDRESS.exists():
        return None
    with UI_ADDRESS.open() as file:
        return (file.read() or None) if files.is_locked(file) else None  # empty while it starts


def _ui_server_that_answers() -> str | None:
    """Return the address of the server of a `make ui` here; None where it hangs, too."""
    address = ui_server()
    if address and (error := _health_error(address)):
        print(
            f"the server of make ui, {address}, does not answer ({plain_reason(error)}): "
            "the run starts its own",
            file=sys.stderr,
        )
        return None
    return address


@contextmanager
def _reporting_to(server: PrefectServer) -> Iterator[None]:
    """Point Prefect, which has read its settings when it was imported, to a server."""
    from prefect.context import refresh_global_settings_context
    from prefect.logging.handlers import APILogWorker
    from prefect.settings import get_current_settings, temporary_settings

    address, before = server.address, os.environ.get("PREFECT_API_URL")
    os.environ["PREFECT_API_URL"] = address
    if before != address:  # it takes a fifth of a second
        refresh_global_settings_context()
    _keep_logs_off_terminal()
    flows = get_current_settings().flows
    # the thread that sends heartbeats delays the end of every flow run by a second
    beat = flows.heartbeat_frequency if "heartbeat_frequency" in flows.model_fields_set else None
    # tasks of a run whose server is away have no flow run around them
    changes = {"flows.heartbeat_frequency": beat, "logging.to_api.when_missing_flow": "ignore"}
    on_error = partial(_queue_end, address)

    def timeout() -> float:
        return AWAY_TIMEOUT if server.is_away else STOP_TIMEOUT

    try:
        with (
            bounded(server),
            queue_events(lambda: server.is_away, timeout),
            temporary_settings(changes),
            survive_outages(on_error),
        ):
            yield
    finally:
        APILogWorker.drain_all(timeout=timeout())
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
    # a line for each sub-step, which the graph shows, would hide what a stage prints
    for name, level in (("flow_runs", logging.INFO), ("task_runs", logging.WARNING)):
        logger = logging.getLogger(f"prefect.{name}")
        logger.setLevel(level)
        logger.propagate = False


# ---------------------------------------------------------------- ends of flow runs


def _queue_end(address: str, flow_run: str, state: State[Any], error: Exception) -> None:
    """Queue the end of a flow run for a later call to send; other states are not worth it."""
    shown = address_without_password(address)
    if not isinstance(error, AwayError):  # which has been said
        print(
            f"Prefect's server {shown} did not accept the state {state.name} of a flow run "
            f"({without_password(str(error))}): the run goes on, and a later call sends how it "
            "ended",
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
    from prefect.exceptions import ObjectNotFound
    from prefect.states import State

    sent, shown = 0, address_without_password(address)
    with _asking_once(address) as client:
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

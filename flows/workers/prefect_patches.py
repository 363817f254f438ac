"""All patches of Prefect's internals, each with its reason.

Prefect 3.7 has no setting for any of them. Each one holds for the time of a block.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.host import files

if TYPE_CHECKING:
    from prefect.states import State

HOME = Path(".beamline/prefect")
STOP = 10.0  # seconds that a server has to end
RECONNECTIONS = 20  # attempts, a second apart, that an event waits for; Prefect itself: 10
UNTOLD = HOME / "untold"  # the ends of flow runs that no server has taken yet


@contextmanager
def queue_events() -> Iterator[None]:
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


def log_to_ui_only() -> None:
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
def survive_outages(address: str) -> Iterator[None]:
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
    with files.replaced(UNTOLD / f"{flow_run}.json") as partial:
        partial.write_text(json.dumps(said))


async def settle_events() -> None:
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

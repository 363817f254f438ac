"""Patches of Prefect's internals, each with its reason and the upstream issue.

No setting of Prefect 3.7 replaces any of them. Three other places reach into a library's internals,
where the rules on imports (pyproject.toml) put them:

- flows/runs/dvc_command.py silences ``dvc.ui.ui.enable``: DVC's hints after a stage would hide the
  stage's own last line. DVC has no setting for it (related: treeverse/dvc#9239).
- flows/tracking/store.py closes ``MlflowClient._tracking_client.store.engine``, since a client has
  no ``close``. No upstream issue found.
- tasks/engines/vllm/policy_worker.py replaces the class of vLLM's sampler by a subclass that
  measures entropies. No upstream issue found.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect.states import State

RECONNECTIONS = 20  # attempts, a second apart, that the first event waits for; Prefect itself: 10


@contextmanager
def queue_events(is_away: Callable[[], bool], timeout: Callable[[], float]) -> Iterator[None]:
    """Queue events while the server is unreachable, with one long wait instead of one each.

    The first event that finds no server has RECONNECTIONS attempts, each later one a single attempt
    until one succeeds; so has each event for a server that is known to be away. Prefect sends what
    was not accepted along with the next event that is. At the end of the block, queued events have
    ``timeout`` seconds.

    Reason: each event waits ten seconds for the server, one after the other, which holds up the end
    of a run by minutes, and then it is lost (PrefectHQ/prefect#20423). The class is patched because
    ``EventsWorker`` accepts no client of another class.
    """
    from prefect.events.clients import PrefectEventsClient
    from prefect.events.worker import EventsWorker

    emit, attach = PrefectEventsClient._emit, EventsWorker.attach_related_resources_from_context

    async def attach_if_reachable(self: Any, event: Any) -> None:
        with suppress(Exception):
            if self._client._reconnection_attempts:  # else the server would be asked in vain
                await attach(self, event)

    async def emit_or_queue(self: Any, event: Any) -> None:
        if is_away():
            self._reconnection_attempts = 0
        try:
            await emit(self, event)
            self._reconnection_attempts = RECONNECTIONS
        except Exception:  # the client keeps the event and sends it again
            self._reconnection_attempts = 0

    EventsWorker.set_client_override(PrefectEventsClient, reconnection_attempts=RECONNECTIONS)
    PrefectEventsClient._emit = emit_or_queue  # type: ignore[method-assign]
    EventsWorker.attach_related_resources_from_context = attach_if_reachable  # type: ignore[method-assign]
    try:
        yield
    finally:
        EventsWorker.set_client_override(None)
        EventsWorker.drain_all(timeout=timeout())
        PrefectEventsClient._emit = emit  # type: ignore[method-assign]
        EventsWorker.attach_related_resources_from_context = attach  # type: ignore[method-assign]


@contextmanager
def survive_outages(on_error: Callable[[str, State[Any], Exception], None]) -> Iterator[None]:
    """Let flow runs begin and end while the server is unreachable.

    ``on_error`` receives the id of the flow run, the state that the server did not accept, and the
    error.

    Reason: a state that cannot be set ends the flow run with an error; client retries only delay
    that (PrefectHQ/prefect#20462, open).
    """
    import httpx
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas import responses
    from prefect.exceptions import ObjectNotFound

    set_state = SyncPrefectClient.set_flow_run_state

    def set_or_report(self: Any, flow_run_id: Any, state: State[Any], force: bool = False) -> Any:
        try:
            return set_state(self, flow_run_id, state, force)
        except (httpx.HTTPError, ObjectNotFound) as error:
            on_error(str(flow_run_id), state, error)
            return responses.OrchestrationResult[Any](
                state=state,
                status=responses.SetStateStatus.ACCEPT,
                details=responses.StateAcceptDetails(),
            )

    SyncPrefectClient.set_flow_run_state = set_or_report  # type: ignore[method-assign]
    try:
        yield
    finally:
        SyncPrefectClient.set_flow_run_state = set_state  # type: ignore[method-assign]


async def settle_events(timeout: float) -> None:
    """Wait until the server has stored the events that clients sent; task runs are made of them.

    Reason: a server drops at its end the events that it has not processed yet, and their task runs
    stay RUNNING. PrefectHQ/prefect#18790 (open) reports the symptom; no issue on the cause found.
    The counters are no public interface.
    """
    from prefect.server.utilities.messaging.memory import METRICS

    quiet_checks = 0
    before: dict[str, int] = {}
    deadline = time.monotonic() + timeout
    while quiet_checks < 3 and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        now = dict(METRICS["events"])
        settled = now == before and now["published"] == now["consumed"]
        quiet_checks = quiet_checks + 1 if settled else 0
        before = now


def begin_transactions_as_writes() -> None:
    """Have a server on SQLite begin each transaction with a write lock, for its whole life.

    Reason: a transaction that reads first and finds another one writing fails at once with
    "database is locked", upon which the client waits for two seconds or more; one that begins as a
    write waits some milliseconds for its turn (PrefectHQ/prefect#18934, open).
    """
    from prefect.server.database.configurations import AioSqliteConfiguration as Sqlite

    begin = Sqlite.begin_transaction
    Sqlite.begin_transaction = (  # type: ignore[method-assign]
        lambda self, session, **_: begin(self, session, with_for_update=True)
    )

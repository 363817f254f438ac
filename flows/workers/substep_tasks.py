"""Show the sub-steps of a flow run as its task runs.

The ledger is the one memory of what they made: Prefect stores no results, and looks for none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.states import Completed

from flows.runs import ledger_mirror
from flows.workers.own_files import OwnFiles
from tasks.ledger.artifacts import Record
from tasks.ledger.substeps import Ledger, Work

CACHED = "Cached"  # Prefect's name for the end of a task run that had nothing to compute


@contextmanager
def opened() -> Iterator[Ledger]:
    """Yield a run's ledger, as ``ledger_mirror.opened``; a flow run shows its sub-steps."""
    with ledger_mirror.opened() as ledger:
        ledger.check = OwnFiles().check
        if FlowRunContext.get():
            ledger.run_sub_step = run_as_task
        yield ledger


def run_as_task(verb: str, work: Work) -> Record:
    """Return the record of a sub-step, which is a task run with the verb's name meanwhile.

    The task run ends in the state Completed, in one named "Cached" where the ledger had the record,
    or in Failed with the error, which is raised. It belongs to the flow run of the context: another
    thread needs a copy of it.
    """
    records: list[Record] = []

    def run() -> State[None] | None:
        record, cached = work()
        records.append(record)
        return Completed(name=CACHED) if cached else None

    run.__qualname__ = verb  # of which Prefect makes the task's key
    Task(run, name=verb, cache_policy=NO_CACHE, persist_result=False)()
    return records[0]

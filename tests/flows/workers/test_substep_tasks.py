"""Sub-steps as task runs of a real server: their states, and what Prefect stores of them."""

import json
import threading
import time
from contextvars import copy_context
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.context import refresh_global_settings_context
from prefect.runtime import flow_run

from flows.workers import substep_tasks
from tasks.ledger import artifacts
from tasks.ledger.artifacts import PrunedError
from tasks.ledger.substeps import SubStep, recorded
from tests.tasks.ledger.toy import Inputs, train
from tests.waiting import LONGEST


@recorded
def spoil(step, inputs, computed):
    raise PrunedError("the weights have been pruned")


class Run:
    """The sub-steps of one flow run: where they ran, and what they made."""

    def __init__(self, api):
        self.api = api
        self.computed = []
        self.records = []
        self.flow_run = None

    def __call__(self, *work):
        """Do the work in a flow run, one after the other, with the ledger that it opens."""

        @flow(name="toy")
        def stage():
            self.flow_run = flow_run.id
            with substep_tasks.opened() as ledger:
                for each in work:
                    each(ledger)

        stage()

    def train(self, ledger, iteration=0):
        made = train(
            SubStep("toy", "first", iteration, 1, ledger), Inputs(), computed=self.computed
        )
        self.records.append(made)

    def states(self, count):
        """The states of the task runs by verb, in the order of their starts."""
        found = FlowRunFilter(id=FlowRunFilterId(any_=[self.flow_run]))
        deadline = time.monotonic() + LONGEST
        with SyncPrefectClient(self.api) as client:
            while time.monotonic() < deadline:
                runs = client.read_task_runs(flow_run_filter=found)
                if len(runs) >= count and all(run.state.is_final() for run in runs):
                    break
                time.sleep(0.05)
        runs.sort(key=lambda run: run.start_time)
        return [(run.name.rpartition("-")[0], run.state_type.name, run.state_name) for run in runs]


@pytest.fixture
def run(project, api, monkeypatch):
    """What runs a flow on the tests' server; whatever Prefect may store lies in the project."""
    changes = {
        "API_URL": api,
        "LOCAL_STORAGE_PATH": str(project / "stored"),
        "TASKS_DEFAULT_PERSIST_RESULT": "true",
    }
    for name, value in changes.items():
        monkeypatch.setenv(f"PREFECT_{name}", value)
    refresh_global_settings_context()
    yield Run(api)
    monkeypatch.undo()
    refresh_global_settings_context()


def test_substeps_are_task_runs_and_cached_where_the_ledger_has_them(run):
    run(run.train, run.train, lambda ledger: run.train(ledger, 1))
    states = [("COMPLETED", "Completed"), ("COMPLETED", "Cached"), ("COMPLETED", "Completed")]
    assert run.states(3) == [("train", *state) for state in states]
    assert run.computed == [0, 1]
    assert run.records[0] == run.records[1]
    run(run.train)
    assert run.states(1) == [("train", "COMPLETED", "Cached")]


def test_failed_substep_raises_its_own_error_and_is_shown_as_failed(run):
    def fail(ledger):
        with pytest.raises(PrunedError, match="have been pruned"):
            spoil(SubStep("toy", "first", 0, 1, ledger), Inputs(), computed=[])

    run(run.train, fail)
    assert run.states(2)[1] == ("spoil", "FAILED", "Failed")


def test_substep_of_another_thread_belongs_to_the_flow_run(run):
    def beside(ledger):
        thread = threading.Thread(target=copy_context().run, args=(run.train, ledger))
        thread.start()
        thread.join()

    run(beside)
    assert run.states(1) == [("train", "COMPLETED", "Completed")]


def test_prefect_stores_no_record_and_none_is_believed(run):
    """Even where the environment has results stored, and an earlier version has left one."""
    run(run.train)
    (place,) = artifacts.ROOT.rglob("0000-train-*")
    assert not list(Path("stored").rglob("*"))
    poisoned = artifacts.ROOT / "prefect" / place.relative_to(artifacts.ROOT)
    poisoned.parent.mkdir(parents=True)
    serializer = {"type": "json", "object_encoder": None, "object_decoder": None}
    metadata = {"storage_key": str(poisoned.absolute()), "serializer": serializer}
    forged = json.dumps({"metrics": {"loss": 9}})
    poisoned.write_text(json.dumps({"metadata": metadata, "result": forged}))
    run(run.train)
    assert run.records[1] == run.records[0]
    (place / "table.txt").write_text("damaged")
    run(run.train)
    assert run.computed == [0, 0], "only the ledger knows what is whole"
    assert run.records[2]["artifacts"] == run.records[0]["artifacts"]


def test_ledger_of_no_flow_run_calls_substeps_as_they_are(project, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")  # nobody is there
    with substep_tasks.opened() as ledger:
        made = train(SubStep("toy", "first", 0, 1, ledger), Inputs(), computed=[])
    assert made["verb"] == "train"

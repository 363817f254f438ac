import subprocess
import sys
import uuid
from pathlib import Path

import httpx
import pytest
from prefect import flow, task
from prefect.client.orchestration import SyncPrefectClient
from prefect.states import Pending

from flows import stage
from tests import toy_project as toy


def run(project, **environment):
    return subprocess.run(
        [sys.executable, "first.py", "toy"],
        cwd=project,
        env=toy.environment(**environment),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_stage_by_itself_is_a_flow_run_of_its_own(project, api):
    ran = run(project, PREFECT_API_URL=api)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "first has run\n", "")
    filters = {"name": {"any_": ["first toy"]}, "parent_task_run_id": {"is_null_": True}}
    body = {"flow_runs": filters, "sort": "START_TIME_DESC"}
    found = httpx.post(f"{api}/flow_runs/filter", json=body).json()[0]
    assert found["state_type"] == "COMPLETED"
    assert found["parameters"] == {"recipe": "toy"}


def test_a_stage_of_a_retrain_run_is_the_child_of_its_task_as_prefect_makes_subflows(project, api):
    @task
    def work():
        pass

    @flow
    def parent():
        pass

    with SyncPrefectClient(api) as client:
        above = client.create_flow_run(parent)
        task_run = client.create_task_run(work, above.id, "0", state=Pending())
        ran = run(project, PREFECT_API_URL=api, BEAMLINE_PARENT_TASK_RUN=str(task_run.id))
        assert ran.returncode == 0, ran.stderr
        told = client.read_task_run(task_run.id)
        child = client.read_flow_run(told.state.state_details.child_flow_run_id)
    assert told.state.is_completed()
    assert child.parent_task_run_id == task_run.id
    assert child.name == "first toy"
    assert child.state.is_completed()


def test_a_task_run_that_the_server_does_not_know_is_an_error(api, monkeypatch):
    monkeypatch.setattr(stage, "RECORDED", 0.2)
    with SyncPrefectClient(api) as client, pytest.raises(RuntimeError, match="task-run recorder"):
        stage._recorded(client, uuid.uuid4())


def test_a_recipe_that_does_not_hold_is_one_message_and_no_server_is_asked(project):
    toy.write_recipe(project, seed=-1)
    ran = run(project, PREFECT_API_URL="http://127.0.0.1:9/api")
    assert ran.returncode == 2
    [line] = ran.stderr.splitlines()
    assert line.startswith("first toy: params/toy.yaml: 'seed' = -1")


def test_a_flow_that_fails_is_one_message(project, api):
    toy.write_stage(project, "first", flows=True, before="raise RuntimeError('table: 3 rows')")
    ran = run(project, PREFECT_API_URL=api)
    assert (ran.returncode, ran.stderr) == (1, "first toy: table: 3 rows\n")
    assert not Path("data").exists()


def test_a_fault_that_no_stage_foresees_keeps_its_traceback(project, api):
    toy.write_stage(project, "first", flows=True, before="{}['no such key']")
    ran = run(project, PREFECT_API_URL=api)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == "KeyError: 'no such key'"

import logging
import sys
import threading
import uuid
from pathlib import Path

import httpx
import pytest
from prefect import flow, task
from prefect.client.orchestration import SyncPrefectClient
from prefect.context import refresh_global_settings_context
from prefect.runtime import flow_run
from prefect.states import Pending

from flows.workers import stage, substep_tasks
from tasks.engines.vllm import kind as vllm
from tests import toy_project as toy


@flow
def first(recipe: str) -> str:
    return recipe


@pytest.fixture
def reported(project, api, monkeypatch):
    """A toy project, with the server of the tests as the configured one."""
    monkeypatch.setenv("PREFECT_API_URL", api)
    refresh_global_settings_context()
    return project


def test_stage_alone_is_a_flow_run(project, api):
    ran = toy.run(project, sys.executable, "first.py", "toy", PREFECT_API_URL=api)
    assert (ran.returncode, ran.stdout) == (0, "first has run\n")
    filters = {"name": {"any_": ["toy: first"]}, "parent_task_run_id": {"is_null_": True}}
    body = {"flow_runs": filters, "sort": "START_TIME_DESC"}
    found = httpx.post(f"{api}/flow_runs/filter", json=body).json()[0]
    assert found["state_type"] == "COMPLETED"
    assert found["parameters"] == {"recipe": "toy"}
    assert "first has run" in logged(api, found["id"])


def logged(api, flow_run):
    """The log of a flow run."""
    body = {"logs": {"flow_run_id": {"any_": [flow_run]}}, "sort": "TIMESTAMP_ASC"}
    return [entry["message"] for entry in httpx.post(f"{api}/logs/filter", json=body).json()]


def test_log_of_a_flow_run_has_what_is_printed_and_what_is_warned(reported, api, capsys):
    ran = []

    @flow(name="first")
    def printing(recipe: str) -> None:
        ran.append(flow_run.id)
        print("iteration", 1, end="")
        print(", reward 0.5\n\nhalf a line", end="")
        thread = threading.Thread(target=print, args=(" of a thread",))
        thread.start()
        thread.join()
        logging.getLogger("flows.tracking.run").warning("a message was dropped")
        logging.getLogger("somebody.else").warning("what no one asked for")

    for _ in range(2):
        assert stage.run(printing, "toy") == 0
    print("after it")
    lines = ["iteration 1, reward 0.5", "half a line of a thread", "a message was dropped"]
    for number in ran:
        begins, *between, ends = logged(api, number)
        assert between == lines
        assert begins.startswith("Beginning flow run") and ends.startswith("Finished in state")
    once = "iteration 1, reward 0.5\n\nhalf a line of a thread\n"
    assert capsys.readouterr().out == once * 2 + "after it\n"


def test_stage_of_a_run_is_a_child_of_its_task_run(reported, api, monkeypatch):
    @task
    def work():
        pass

    with SyncPrefectClient(api) as client:
        above = client.create_flow_run(first, parameters={"recipe": "toy"})
        task_run = client.create_task_run(work, above.id, "0", state=Pending())
        monkeypatch.setenv(stage.PARENT_TASK_RUN, str(task_run.id))
        assert stage.run(first, "toy") == 0
        told = client.read_task_run(task_run.id)
        child = client.read_flow_run(told.state.state_details.child_flow_run_id)
    assert told.state.is_completed()
    assert child.parent_task_run_id == task_run.id
    assert child.name == "toy: first"
    assert child.state.is_completed()


def test_stage_runs_where_its_task_run_is_not_recorded(reported, monkeypatch, capsys):
    monkeypatch.setattr(stage, "RECORD_TIMEOUT", 0.2)
    monkeypatch.setenv(stage.PARENT_TASK_RUN, str(uuid.uuid4()))
    ran = []
    assert stage.run(flow(lambda recipe: ran.append(recipe), name="first"), "toy") == 0
    assert ran == ["toy"]
    [line] = capsys.readouterr().err.splitlines()
    assert "has not recorded the task run" in line
    assert "incomplete" in line


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": -1}, "first toy: params/toy.yaml: 'seed' = -1"),
        ({"reinforce__algorithm": "apro"}, "first toy: reinforce.algorithm 'apro' is no row of"),
    ],
)
def test_invalid_recipe_is_one_message(project, capsys, changes, said):
    toy.write_recipe(project, **changes)
    assert stage.run(first, "toy") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


def test_a_missing_device_and_engine_are_found_before_any_work(project, monkeypatch):
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    stage.check_machine("toy")
    toy.write_recipe(project, engine__kind="vllm", machine__device="cuda")
    with pytest.raises(ValueError, match=r"params/toy\.yaml: 'engine\.kind' = 'vllm'") as raised:
        stage.check_machine("toy")
    assert "\nparams/toy.yaml: 'machine.device' = 'cuda': " in str(raised.value)


@flow
def prepare(recipe: str) -> str:
    return recipe


@pytest.mark.parametrize("in_a_run", [False, True])
def test_first_stage_alone_says_what_later_ones_lack(reported, monkeypatch, capsys, in_a_run):
    """It may run all the same; as part of a run, the run has said it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(stage, "RECORD_TIMEOUT", 0.2)
    if in_a_run:
        monkeypatch.setenv(stage.PARENT_TASK_RUN, str(uuid.uuid4()))
    system = "Write <search>words</search>."
    toy.write_recipe(reported, machine__device="cuda", dialogue__system=system)
    assert stage.run(prepare, "toy") == 0
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if line.startswith("prepare toy: params/toy.yaml: ")]
    assert len(said) == (0 if in_a_run else 2)
    assert in_a_run or "shows the tags <search>" in said[0]
    assert in_a_run or "later stages cannot run on this machine: 'machine.device'" in said[1]


def test_disk_without_room_is_found_before_any_work(project):
    stage.check("toy")
    toy.write_recipe(project, machine__disk_gib=1e-6)
    with pytest.raises(ValueError, match=r"params/toy\.yaml: the run may need .*disk_gib grants"):
        stage.check("toy")
    stage.check("toy", stages=[])


@pytest.mark.parametrize("error", [RuntimeError, ValueError, OSError])
def test_failing_flow_is_one_message(reported, capsys, error):
    @flow(name="first")
    def failing(recipe: str) -> None:
        raise error("table: 3 rows")

    assert stage.run(failing, "toy") == 1
    assert capsys.readouterr().err == "first toy: table: 3 rows\n"


def test_a_file_of_ones_own_that_changes_meanwhile_is_named(reported, capsys):
    Path("own").mkdir(exist_ok=True)
    Path("own/world.py").write_text("a = 1\n")

    @flow(name="first")
    def writing(recipe: str) -> None:
        Path("own/episodes.log").write_text("one\n")

    assert stage.run(writing, "toy") == 0
    said = capsys.readouterr().err
    assert "first toy: new while it ran: own/episodes.log. What is in own/ decides" in said


def test_a_file_of_ones_own_that_is_edited_meanwhile_ends_the_stage(reported, capsys):
    """No sub-step is kept under the key of code that it did not run, and DVC notes nothing."""
    Path("own").mkdir(exist_ok=True)
    Path("own/world.py").write_text("a = 1\n")
    kept = []

    @flow(name="first")
    def edited(recipe: str) -> None:
        with substep_tasks.opened() as ledger:
            for text in ("a = 1\n", "a = 2\n"):
                Path("own/world.py").write_text(text)
                ledger.check()
                kept.append(text)

    assert stage.run(edited, "toy") == 1
    assert "first toy: own/world.py changed while it ran" in capsys.readouterr().err
    assert kept == ["a = 1\n"]

    @flow(name="first")
    def edited_last(recipe: str) -> None:
        Path("own/world.py").write_text("a = 3\n")

    assert stage.run(edited_last, "toy") == 1


@pytest.mark.parametrize("raised", ["int('hello')", "{}['hello']"])
def test_an_error_of_ones_own_code_is_named_with_its_place(reported, capsys, raised):
    Path("own").mkdir(exist_ok=True)
    Path("own/speech.py").write_text(f"def read(text):\n    return {raised}\n")
    code = compile(Path("own/speech.py").read_text(), Path("own/speech.py").resolve(), "exec")
    exec(code, module := {})

    @flow(name="first")
    def reading(recipe: str) -> None:
        module["read"]("hello")

    assert stage.run(reading, "toy") == 1
    said = capsys.readouterr().err
    assert said.startswith("first toy: own/speech.py, line 2, in read: ")
    assert "hello" in said


def test_unexpected_error_keeps_its_traceback(reported):
    @flow
    def failing(recipe: str) -> None:
        {}["no such key"]

    with pytest.raises(KeyError, match="no such key"):
        stage.run(failing, "toy")


def test_full_disk_is_named_whatever_failed(reported, capsys, monkeypatch):
    @flow(name="first")
    def failing(recipe: str) -> None:
        raise OSError("I/O error (os error 28)")

    monkeypatch.setattr(stage.disk, "FULL", 10**18)
    assert stage.run(failing, "toy") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("first toy: I/O error (os error 28). The disk is full")

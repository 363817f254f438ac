import contextlib
import fcntl
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from prefect.context import refresh_global_settings_context
from prefect.settings import PREFECT_API_URL

from flows import ui
from flows.workers import connection, prefect_patches, server
from tests import toy_project as toy

AWAY = """
import os, signal, sys, time
import psutil
from prefect import flow, task
from flows.workers.connection import name_process, prefect_server

@task
def work(number):
    time.sleep(0.1)

@flow(on_running=[name_process])
def busy():
    for number in range(10):
        work(number)
        if number == 4:
            {then}

with prefect_server() as address:
    busy()
print("went on")
"""
KILL_OWN = "[server] = psutil.Process().children(); server.kill()"
TELL_AND_WAIT = "print('now', flush=True); sys.stdin.readline()"


RUN = """
import os
from prefect import flow, task
from flows.workers.connection import prefect_server

@task
def work(number):
    pass

@flow
def busy():
    for number in range(30):
        work(number)

with prefect_server() as address:
    print(address, os.environ["PREFECT_API_URL"] == address)
    busy()
print(os.environ.get("PREFECT_API_URL"))
"""


def states_of_task_runs(folder=Path()):
    return ask(folder, "select state_type, count(*) from task_run group by 1")


def ask(folder, query):
    with closing(sqlite3.connect(folder / prefect_patches.HOME / "prefect.db")) as store:
        return store.execute(query).fetchall()


def test_a_run_without_a_server_has_one_that_keeps_all_it_was_told(project):
    ran = toy.run(project, sys.executable, "-c", RUN)
    assert ran.returncode == 0, ran.stdout
    first, *rest = ran.stdout.splitlines()
    assert rest == ["None"], "nothing is said but what the run itself prints"
    address, is_set = first.split()
    assert is_set == "True"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health")
    assert (prefect_patches.HOME / "server.log").read_text() == ""
    # the last events come just before the end; left to itself, the server drops some of them
    assert states_of_task_runs() == [("COMPLETED", 30)]


def test_a_server_of_ones_own_that_is_killed_is_started_again_and_misses_nothing(project):
    ran = toy.run(project, sys.executable, "-c", AWAY.format(then=KILL_OWN))
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.splitlines() == [
        "Prefect's server has ended by itself: it is started again",
        "went on",
    ]
    assert states_of_task_runs() == [("COMPLETED", 10)]
    assert ask(Path(), "select state_type from flow_run") == [("COMPLETED",)]
    [(process,)] = ask(Path(), "select infrastructure_pid from flow_run")
    assert process.startswith(f"{socket.gethostname()}:")
    assert toy.processes(project) == []


class Elsewhere:
    """A server in a folder of its own, that can be stopped and started at the same address."""

    def __init__(self, folder):
        self.folder, self.port = folder, 0
        self.start()

    def start(self):
        with contextlib.chdir(self.folder), (self.folder / "log").open("ab") as log:
            prefect_patches.HOME.mkdir(parents=True, exist_ok=True)
            self.process, self.port = server.start_prefect("run", self.port, log)
            server.await_answer(self.process, self.port, "/api/health", log.name)
        self.address = f"http://{server.HOST}:{self.port}/api"

    def stop(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def elsewhere(project, tmp_path_factory):
    found = Elsewhere(tmp_path_factory.mktemp("elsewhere"))
    yield found
    found.stop()


@pytest.fixture
def reporting(project, elsewhere):
    """A run that reports to a server elsewhere, and waits in its middle for a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", AWAY.format(then=TELL_AND_WAIT)],
        env=toy.environment(PREFECT_API_URL=elsewhere.address, PREFECT_CLIENT_RETRY_JITTER="0"),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout.readline() == "now\n"
    yield process
    process.kill()
    process.wait()


def test_a_server_elsewhere_that_is_stopped_and_started_misses_nothing(elsewhere, reporting):
    elsewhere.stop()
    reporting.stdin.write("\n")
    reporting.stdin.flush()
    time.sleep(12)  # Prefect itself gives each event up after seven seconds
    elsewhere.start()
    said, _ = reporting.communicate(timeout=120)
    assert (reporting.returncode, said) == (0, "went on\n")
    assert states_of_task_runs(elsewhere.folder) == [("COMPLETED", 10)]
    assert ask(elsewhere.folder, "select state_type from flow_run") == [("COMPLETED",)]


def test_a_run_ends_well_without_its_server_which_the_next_one_tells_how(
    project, elsewhere, reporting, monkeypatch
):
    elsewhere.stop()
    began = time.monotonic()
    said, _ = reporting.communicate("\n", timeout=200)
    assert reporting.returncode == 0, said
    assert len(said.splitlines()) == 2, said
    first, last = said.splitlines()
    assert first.startswith(f"Prefect's server {elsewhere.address} does not take the state Compl")
    assert last == "went on"
    assert time.monotonic() - began < 100
    with connection.prefect_server():
        assert len(list(prefect_patches.UNTOLD.iterdir())) == 1, "another server has no use for it"
    elsewhere.start()
    assert ask(elsewhere.folder, "select state_type from flow_run") == [("RUNNING",)]
    monkeypatch.setenv("PREFECT_API_URL", elsewhere.address)
    refresh_global_settings_context()
    with connection.prefect_server():
        assert list(prefect_patches.UNTOLD.iterdir()) == []
    assert ask(elsewhere.folder, "select state_type from flow_run") == [("COMPLETED",)]


def test_a_stage_whose_run_has_lost_its_server_starts_one_of_its_own(project, monkeypatch, capsys):
    monkeypatch.setattr(connection, "PATIENCE", 0.5)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setenv(connection.PARENT_TASK_RUN, "a task run that nobody knows")
    refresh_global_settings_context()
    with connection.prefect_server() as address:
        assert httpx.get(f"{address}/health").status_code == 200
        assert connection.PARENT_TASK_RUN not in os.environ
    said = "Prefect's server http://127.0.0.1:9/api is away: this stage starts one of its own\n"
    assert capsys.readouterr().out == said


def test_the_configured_server_is_used_also_by_other_threads_and_let_go_again(
    project, api, monkeypatch
):
    monkeypatch.setenv("PREFECT_API_URL", api)
    refresh_global_settings_context()
    seen = []
    with connection.prefect_server() as address:
        thread = threading.Thread(target=lambda: seen.append(PREFECT_API_URL.value()))
        thread.start()
        thread.join()
    assert seen == [address] == [api]
    assert os.environ["PREFECT_API_URL"] == api
    assert not prefect_patches.HOME.exists()


def test_a_configured_server_that_does_not_answer_is_an_error(project, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    refresh_global_settings_context()
    remedy = r"PREFECT_API_URL is http://127.0.0.1:9/api, which does not answer .* or unset"
    with pytest.raises(RuntimeError, match=remedy), connection.prefect_server():
        pytest.fail("there is no server")


def test_a_server_that_cannot_start_is_an_error_that_names_its_log(project):
    prefect_patches.HOME.mkdir(parents=True)
    (prefect_patches.HOME / "prefect.db").write_text("no database")
    where = r"\.beamline/prefect/server\.log says why"
    with pytest.raises(RuntimeError, match=where), connection.prefect_server():
        pytest.fail("it cannot have started")
    assert "file is not a database" in (prefect_patches.HOME / "server.log").read_text()


def test_writes_that_meet_wait_for_their_turn_instead_of_failing(api):
    flow = httpx.post(f"{api}/flows/", json={"name": "busy"}).json()["id"]

    def write(number):
        with httpx.Client(base_url=api, timeout=60) as client:
            made = client.post("/flow_runs/", json={"flow_id": flow, "name": f"busy {number}"})
            state = {"state": {"type": "RUNNING"}, "force": True}
            moved = client.post(f"/flow_runs/{made.json()['id']}/set_state", json=state)
            return made.status_code, moved.status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(write, range(48))) == {(201, 201)}


def test_the_address_of_make_ui_counts_while_it_runs(project):
    prefect_patches.HOME.mkdir(parents=True)
    assert connection.ui_server() is None
    connection.UI_ADDRESS.write_text("http://127.0.0.1:4200/api")
    assert connection.ui_server() is None, "nobody holds the file: it was left behind"
    with connection.UI_ADDRESS.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert connection.ui_server() == "http://127.0.0.1:4200/api"


def test_a_port_that_is_taken_is_passed_over():
    with socket.create_server((server.HOST, 0)) as taken:
        port = taken.getsockname()[1]
        assert ui._free(port) > port


def test_a_database_that_is_there_is_not_overwritten(tmp_path):
    for name in ("old", "new"):
        with closing(sqlite3.connect(tmp_path / name)) as store:
            store.execute(f"create table {name} (a)")
    server._copy_database(tmp_path / "new", tmp_path / "old")
    server._copy_database(tmp_path / "new", tmp_path / "third")
    for name, table in (("old", "old"), ("third", "new")):
        with closing(sqlite3.connect(tmp_path / name)) as store:
            assert store.execute("select name from sqlite_master").fetchall() == [(table,)]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.fixture
def shown(project):
    """A `make ui` of the project."""
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.ui"],
        env=toy.environment(),
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    yield process
    process.terminate()
    process.wait()


def test_make_ui_shows_runs_in_both_uis_until_ctrl_c(project, shown):
    pages = [shown.stdout.readline().split() for _ in range(2)]
    assert [name for name, _ in pages] == ["Prefect", "MLflow"], pages
    assert shown.stdout.readline() == "Ctrl-C ends both.\n"
    prefect, mlflow = (address for _, address in pages)
    assert "<title>Prefect Server</title>" in httpx.get(prefect).text
    assert httpx.get(f"{prefect}/ui-settings").json()["api_url"] == f"{prefect}/api"
    assert "<title>MLflow</title>" in httpx.get(mlflow).text

    with connection.prefect_server() as address:
        assert address == f"{prefect}/api"
    second = toy.run(project, sys.executable, "-m", "flows.ui")
    assert second.returncode == 1
    assert second.stdout == f"make ui: it runs already, see {prefect}/api\n"

    began = time.monotonic()
    os.killpg(shown.pid, signal.SIGINT)
    assert shown.wait(timeout=30) == 0
    assert time.monotonic() - began < 10
    assert toy.processes(project) == []
    assert connection.ui_server() is None

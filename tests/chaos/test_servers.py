"""A run goes on while the servers that it reports to are away, and tells them all when they are
back."""

import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress

import pytest

from tests.chaos import runs
from tests.checkout import environment


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def serve(command, health, folder, **variables):
    """Start a server and wait until it answers."""
    with (folder / "server.log").open("ab") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=folder,
            env=environment() | {"MLFLOW_DISABLE_TELEMETRY": "true"} | variables,
            start_new_session=True,
            stdout=log,
            stderr=log,
        )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(OSError):
            urllib.request.urlopen(health, timeout=2).close()
            return server
        time.sleep(0.2)
    raise AssertionError((folder / "server.log").read_text())


def stop(server):
    runs.kill(runs.below(server.pid))
    server.wait()


@pytest.fixture
def mlflow(tmp_path):
    """Starts the MLflow server of a store; its address, and the store."""
    store, port = tmp_path / "mlflow.db", free_port()
    command = ["mlflow", "server", "--backend-store-uri", f"sqlite:///{store}", "--workers", "1"]
    command += ["--port", str(port), "--artifacts-destination", str(tmp_path / "artifacts")]
    address, started = f"http://127.0.0.1:{port}", []

    def begin():
        jobs = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        started.append(serve(command, f"{address}/health", tmp_path, **jobs))
        return started[-1]

    yield begin, address, store
    for server in started:
        stop(server)


@pytest.fixture
def prefect(tmp_path):
    """Starts a Prefect server; the address of its API."""
    port = free_port()
    command = ["prefect", "server", "start", "--port", str(port)]
    address, started = f"http://127.0.0.1:{port}/api", []

    def begin():
        home = {"PREFECT_HOME": str(tmp_path / "prefect")}
        started.append(serve(command, f"{address}/health", tmp_path, **home))
        return started[-1]

    yield begin, address
    for server in started:
        stop(server)


def test_an_mlflow_server_that_goes_and_comes_back_has_everything_once(
    prepared, unbroken, expected, folder, mlflow
):
    begin, address, store = mlflow
    server = begin()
    runs.copy(prepared, folder)
    run = runs.start(folder, MLFLOW_TRACKING_URI=address)
    runs.wait_for(run, lambda: runs.begun(folder, "0000-rollout"))
    stop(server)
    runs.wait_for(run, lambda: runs.ended(folder, "0001-update"))
    assert list((folder / ".beamline/unsent").glob("*/*")), "what it has to say waits"
    begin()
    assert run.wait(runs.PATIENCE) == 0, runs.said(folder).read_text()
    runs.finish(folder, MLFLOW_TRACKING_URI=address)
    assert runs.outcome(folder) == expected
    assert not list((folder / ".beamline/unsent").glob("*/*"))
    found = [point for point in runs.measured(store) if point[0].startswith("reinforce@")]
    theirs = runs.measured(unbroken / ".beamline/mlflow.db")
    assert found == [point for point in theirs if point[0].startswith("reinforce@")]
    assert found
    runs.check_sound(folder)


def test_a_prefect_server_that_goes_and_comes_back_knows_how_the_run_has_ended(
    prepared, expected, folder, prefect
):
    begin, address = prefect
    server = begin()
    runs.copy(prepared, folder)
    run = runs.start(folder, PREFECT_API_URL=address)
    runs.wait_for(run, lambda: runs.begun(folder, "0000-rollout"))
    stop(server)
    runs.wait_for(run, lambda: runs.ended(folder, "0001-rollout"))
    begin()
    assert run.wait(runs.PATIENCE) == 0, runs.said(folder).read_text()
    runs.finish(folder, PREFECT_API_URL=address)
    assert runs.outcome(folder) == expected
    assert set(flow_runs(address).values()) == {"COMPLETED"}
    runs.check_sound(folder)


@pytest.mark.parametrize("number", range(4))
def test_a_server_that_is_killed_for_good(
    prepared, whole, expected, folder, mlflow, prefect, number
):
    begin, variable, address = [
        (mlflow[0], "MLFLOW_TRACKING_URI", mlflow[1]),
        (prefect[0], "PREFECT_API_URL", prefect[1]),
    ][number % 2]
    server = begin()
    runs.copy(prepared, folder)
    run = runs.start(folder, **{variable: address})
    time.sleep(random.Random(number).uniform(0, 0.6 * whole[1]))
    stop(server)
    assert run.wait(runs.PATIENCE) == 0, runs.said(folder).read_text()
    assert runs.outcome(folder) == expected
    runs.check_sound(folder)


def flow_runs(api):
    """The flow runs that a Prefect server knows: name -> type of its state."""
    program = """if True:
        import json
        from prefect.client.orchestration import get_client
        with get_client(sync_client=True) as client:
            print(json.dumps({run.name: run.state_type.value for run in client.read_flow_runs()}))
    """
    ask = [sys.executable, "-c", program]
    return json.loads(subprocess.check_output(ask, env=os.environ | {"PREFECT_API_URL": api}))

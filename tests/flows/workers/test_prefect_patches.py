import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prefect.context import refresh_global_settings_context

from flows.tracking import outbox
from flows.workers import connection
from tests import toy_project as toy

RUN = """
import sys
from prefect import flow, task
from flows.workers import connection, outages, prefect_patches

# the server is away at once, and asked again with each call
outages.PATIENCE = outages.CHECK_EVERY = 0.0
outages.LOSSES = 100
prefect_patches.RECONNECTIONS = 3

@task
def work(number):
    pass

def pause():
    print("pause", flush=True)
    sys.stdin.readline()

@flow
def busy():
    for number in range(10):
        work(number)
        if number in (2, 5, 8):
            pause()

with connection.prefect_server():
    busy()
print("ended")
"""
TASK_RUNS = "select state_type, count(*) from task_run group by 1"
FLOW_RUNS = "select state_type from flow_run"


@pytest.fixture
def run(project, remote):
    """A flow run that reports to the remote server, and pauses three times for a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN],
        env=toy.environment(PREFECT_API_URL=remote.address),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    yield process
    process.kill()
    process.wait()


@pytest.mark.kills
def test_run_survives_outages_of_its_server(api, remote, run, query, monkeypatch):
    def proceed():
        run.stdin.write("\n")
        run.stdin.flush()

    def await_pause():
        lines = []
        while (line := run.stdout.readline()) != "pause\n":
            assert line, "it has ended"
            lines.append(line)
        return lines

    def await_task_runs(count):
        while query(TASK_RUNS, remote.folder) != [("COMPLETED", count)]:
            assert run.poll() is None
            time.sleep(0.1)

    # a server that is stopped and started in the middle of the run misses nothing
    assert await_pause() == []
    await_task_runs(3)
    remote.stop()
    proceed()
    said = await_pause()
    time.sleep(12)  # Prefect itself drops each event after nine seconds
    remote.start()
    proceed()
    said += await_pause()
    await_task_runs(9)

    # the run ends without its server, and the end is queued
    remote.stop()
    printed, _ = run.communicate("\n")
    assert run.returncode == 0, printed
    *more, last = printed.splitlines()
    assert last == "ended"
    # said of the first outage, too, where that was long enough; then of the second one only where
    # the server had been asked between them
    lost = [line for line in [*said, *more] if "answers again" not in line]
    assert lost
    assert all(f"{remote.address} is away" in line and "incomplete" in line for line in lost)
    assert connection.send_unsent_ends(api) == 0, "another server does not know the flow run"
    assert len(outbox.flow_runs().files()) == 1

    # the next run that finds the server sends the end
    remote.start()
    assert query(FLOW_RUNS, remote.folder) == [("RUNNING",)]
    monkeypatch.setenv("PREFECT_API_URL", remote.address)
    refresh_global_settings_context()
    with connection.prefect_server():
        assert outbox.flow_runs().files() == []
    assert query(FLOW_RUNS, remote.folder) == [("COMPLETED",)]


def test_writes_that_meet_wait_for_their_turn(api):
    flow = httpx.post(f"{api}/flows/", json={"name": "busy"}).json()["id"]

    def write(number):
        with httpx.Client(base_url=api, timeout=600) as client:
            made = client.post("/flow_runs/", json={"flow_id": flow, "name": f"busy {number}"})
            state = {"state": {"type": "RUNNING"}, "force": True}
            moved = client.post(f"/flow_runs/{made.json()['id']}/set_state", json=state)
            return made.status_code, moved.status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(write, range(48))) == {(201, 201)}

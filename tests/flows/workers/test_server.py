import socket
import sys

import httpx
import pytest

from flows.workers import connection, server
from tests import toy_project as toy

RUN = """
import os
import psutil
from prefect import flow, task
from flows.workers.connection import name_process, prefect_server

@task
def work(number):
    pass

@flow(on_running=[name_process])
def busy():
    for number in range(30):
        work(number)
        if number == 4:
            [server] = psutil.Process().children()
            server.kill()

with prefect_server() as server:
    print(server.address, os.environ["PREFECT_API_URL"] == server.address)
    busy()
print(os.environ.get("PREFECT_API_URL"))
"""


@pytest.mark.kills
def test_own_server_that_is_killed_misses_nothing(project, query):
    ran = toy.run(project, sys.executable, "-c", RUN)
    assert ran.returncode == 0, ran.stdout
    first, restarted, *rest = ran.stdout.splitlines()
    assert "restarting" in restarted
    assert rest == ["None"], "nothing else is printed but what the run itself prints"
    address, is_set = first.split()
    assert is_set == "True"
    # the last events come just before the end; left to itself, the server drops some of them
    assert query("select state_type, count(*) from task_run group by 1") == [("COMPLETED", 30)]
    [(state, process)] = query("select state_type, infrastructure_pid from flow_run")
    assert state == "COMPLETED"
    assert process.startswith(f"{socket.gethostname()}:")
    assert (server.HOME / "server.log").read_text() == ""
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health")
    assert toy.processes(project) == []


def test_server_that_cannot_start_names_its_log(project):
    server.HOME.mkdir(parents=True)
    (server.HOME / "prefect.db").write_text("no database")
    log = r"\.beamline/prefect/server\.log"
    with pytest.raises(RuntimeError, match=log), connection.prefect_server():
        pytest.fail("it cannot have started")
    assert "file is not a database" in (server.HOME / "server.log").read_text()

"""What pages in a browser may ask of the servers of a run and of `make ui`."""

import http.client
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests import toy_project as toy

EVIL = "page.example.org"


def ask(port, path, method="POST", body='{"limit": 1}', **headers):
    """Send a request; return its status and the origin that may read the answer."""
    with_own = {"Content-Type": "application/json", "Host": f"127.0.0.1:{port}", **headers}
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    asked.request(method, path, body, with_own)
    answer = asked.getresponse()
    return answer.status, answer.headers.get("Access-Control-Allow-Origin")


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The ports of `make ui` in a toy project, by name."""
    folder = tmp_path_factory.mktemp("ui")
    toy.create(folder, flows=True)
    command = [sys.executable, "-m", "flows.ui"]
    started = subprocess.Popen(
        command, cwd=folder, env=toy.environment(), stdout=subprocess.PIPE, text=True
    )
    lines = [started.stdout.readline().split() for _ in range(2)]
    yield {name: urlsplit(address).port for name, address in lines}
    os.kill(started.pid, signal.SIGINT)
    started.wait()


CALLS = {
    "Prefect": "/api/flow_runs/filter",
    "MLflow": "/api/2.0/mlflow/experiments/create",
}


@pytest.mark.parametrize("name", CALLS)
def test_own_page_is_served(shown, name):
    port = shown[name]
    for host in ("127.0.0.1", "localhost"):
        own = f"{host}:{port}"
        body = f'{{"name": "{host}"}}' if name == "MLflow" else "{}"
        status, _ = ask(port, CALLS[name], body=body, Host=own, Origin=f"http://{own}")
        assert status == 200


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "headers",
    [{"Host": f"{EVIL}:4200"}, {"Origin": f"http://{EVIL}"}, {"Origin": "null"}],
    ids=["rebinding", "other page", "sandboxed page"],
)
def test_other_page_is_refused(shown, name, headers):
    status, origin = ask(shown[name], CALLS[name], body='{"name": "theirs"}', **headers)
    assert status == 403
    assert origin is None


def test_other_page_gets_no_leave_to_ask(shown):
    for name, path in CALLS.items():
        headers = {"Origin": f"http://{EVIL}", "Access-Control-Request-Method": "POST"}
        _, origin = ask(shown[name], path, "OPTIONS", **headers)
        assert origin is None, name


def test_servers_listen_on_loopback_alone(shown):
    tables = [Path("/proc/net", name).read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()]
    listening = {line[1].rpartition(":") for line in lines if line[3] == "0A"}
    for port in shown.values():
        assert {host for host, _, own in listening if int(own, 16) == port} == {"0100007F"}

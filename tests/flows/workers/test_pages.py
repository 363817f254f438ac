"""What `make ui` shows, and what pages in a browser may ask of its servers and of a run's."""

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch
from urllib.parse import urlsplit

import httpx
import pytest
from prefect.context import refresh_global_settings_context

from flows.commands import ui
from flows.tracking.run import start_run
from flows.workers import connection, run_pages
from flows.workers.server import HOSTS
from tests import toy_project as toy

EVIL = "page.example.org"
PROXY = "ui.example.org"  # a name that the user allows


def ask(port, path, method="POST", body='{"limit": 1}', **headers):
    """Send a request; return its status and the origin that may read the answer."""
    with_own = {"Content-Type": "application/json", "Host": f"127.0.0.1:{port}", **headers}
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    asked.request(method, path, body, with_own)
    answer = asked.getresponse()
    return answer.status, answer.headers.get("Access-Control-Allow-Origin")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A toy project."""
    folder = tmp_path_factory.mktemp("ui").resolve()
    toy.create(folder, flows=True)
    return folder


@pytest.fixture(scope="module")
def shown(place):
    """The ports of `make ui` in the project, by name; it ends by Ctrl-C, and all of it does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.ui"],
        cwd=place,
        env=toy.environment() | {HOSTS: f"other, {PROXY.upper()}"},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = [process.stdout.readline().split() for _ in range(2)]
    assert [name for name, _ in lines] == ["Prefect", "MLflow"], lines
    assert "Ctrl-C" in process.stdout.readline()
    yield {name: urlsplit(address).port for name, address in lines}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):  # the others while it ends
        os.killpg(process.pid, number)
    assert process.wait() == 0
    assert toy.processes(place) == []
    with contextlib.chdir(place):
        assert connection.ui_server() is None


def test_both_uis_are_shown_and_a_second_call_names_them(shown, place, monkeypatch, capsys):
    prefect, mlflow = (f"http://127.0.0.1:{shown[name]}" for name in ("Prefect", "MLflow"))
    assert "<title>Prefect Server</title>" in httpx.get(prefect).text
    assert httpx.get(f"{prefect}/ui-settings").json()["api_url"] == "/api"
    assert "<title>MLflow</title>" in httpx.get(mlflow).text

    monkeypatch.chdir(place)
    with patch.dict(os.environ, toy.environment(), clear=True):
        refresh_global_settings_context()
        with connection.prefect_server() as server:
            assert server.address == f"{prefect}/api"
        before = {number: signal.getsignal(number) for number in ui.ENDING}
        assert ui.ui() == 1
        for number, handler in before.items():
            signal.signal(number, handler)
    refresh_global_settings_context()
    assert f"{prefect}/api" in capsys.readouterr().err


def test_page_of_a_run_is_served_in_a_sandbox(shown, place, monkeypatch):
    """Its address has no host: what opens it may be the end of a tunnel."""
    monkeypatch.chdir(place)
    server = f"http://127.0.0.1:{shown['Prefect']}"
    with patch.dict(os.environ, toy.environment(PREFECT_API_URL=f"{server}/api"), clear=True):
        run = start_run("toy", {"recipe": "toy"})
        (place / "page.html").write_text("<p>trees</p>")
        run.log_file(place / "page.html")
        without = start_run("toy", {"recipe": "toy"})
        refresh_global_settings_context()
        path = run_pages.path_of(run.id)
    refresh_global_settings_context()
    assert path == f"/page/{run.id}"
    answer = httpx.get(server + path)
    assert (answer.status_code, answer.text) == (200, "<p>trees</p>")
    assert answer.headers["content-type"].startswith("text/html")
    assert "sandbox allow-scripts" in answer.headers["content-security-policy"]
    assert "allow-same-origin" not in answer.headers["content-security-policy"]
    for nobody in (without.id, "0" * 32, "..%2Fmlflow.db"):
        refused = httpx.get(f"{server}/page/{nobody}")
        assert "trees" not in refused.text
        assert refused.status_code == 404
    assert "`beamline page <recipe>`" in httpx.get(f"{server}/page/{without.id}").text
    assert httpx.get(server + path, headers={"Host": f"{EVIL}:4200"}).status_code == 403


def test_a_server_without_pages_gets_no_link(shown, monkeypatch):
    """As one of `prefect server start`; MLflow's answers any path, too."""
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{shown['MLflow']}/api")
    refresh_global_settings_context()
    assert run_pages.path_of("0" * 32) == ""
    monkeypatch.delenv("PREFECT_API_URL")
    refresh_global_settings_context()


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


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:14200", "http://localhost:14200"),
        ("LOCALHOST:4200", "http://localhost:4200"),
        ("[::1]:4200", "http://[::1]:4200"),
        ("localhost", "http://localhost"),
        (PROXY, f"https://{PROXY}"),
    ],
    ids=["tunnel", "case", "IPv6", "no port", "proxy"],
)
def test_own_page_is_served_by_another_name(shown, host, origin):
    status, _ = ask(shown["Prefect"], CALLS["Prefect"], body="{}", Host=host, Origin=origin)
    assert status == 200
    assert ask(shown["Prefect"], CALLS["Prefect"], body="{}", Host=host)[0] == 200


@pytest.mark.parametrize(
    ("headers", "answer"),
    [
        ({"Host": f"{EVIL}:4200"}, f"host '{EVIL}:4200': open it as localhost, or .* in {HOSTS}"),
        ({"Host": f"x@localhost:{EVIL}"}, f"not answer for the host 'x@localhost:{EVIL}'"),
        ({"Origin": "http://localhost:8888"}, "a page of 'http://localhost:8888' may not ask"),
    ],
    ids=["host", "odd host", "page of another program"],
)
def test_refusal_names_the_reason_and_the_remedy(shown, headers, answer):
    port = shown["Prefect"]
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    asked.request("POST", CALLS["Prefect"], "{}", {"Host": f"localhost:{port}", **headers})
    refused = asked.getresponse()
    assert refused.status == 403
    assert re.search(answer, refused.read().decode())


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

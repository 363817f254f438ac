import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from flows import ui
from flows.workers import connection, server
from tests import toy_project as toy


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


def test_make_ui_shows_both_uis_until_ctrl_c(project, shown, monkeypatch, capsys):
    pages = [shown.stdout.readline().split() for _ in range(2)]
    assert [name for name, _ in pages] == ["Prefect", "MLflow"], pages
    assert "Ctrl-C" in shown.stdout.readline()
    prefect, mlflow = (address for _, address in pages)
    assert "<title>Prefect Server</title>" in httpx.get(prefect).text
    assert httpx.get(f"{prefect}/ui-settings").json()["api_url"] == "/api"
    assert "<title>MLflow</title>" in httpx.get(mlflow).text

    with connection.prefect_server() as address:
        assert address == f"{prefect}/api"
    before = {number: signal.getsignal(number) for number in ui.ENDING}
    assert ui.ui() == 1, "a second one"
    for number, handler in before.items():
        signal.signal(number, handler)
    assert f"{prefect}/api" in capsys.readouterr().err

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):  # the others while it ends
        os.killpg(shown.pid, number)
    assert shown.wait() == 0
    assert toy.processes(project) == []
    assert connection.ui_server() is None


@pytest.mark.kills
def test_killed_make_ui_leaves_no_server(project, shown):
    lines = [shown.stdout.readline() for _ in range(3)]
    assert "Ctrl-C" in lines[2], lines
    os.kill(shown.pid, signal.SIGKILL)
    shown.wait()
    deadline = time.monotonic() + 60
    while toy.processes(project) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert toy.processes(project) == []


def test_taken_port_is_passed_over():
    with socket.create_server((server.HOST, 0)) as taken:
        port = taken.getsockname()[1]
        assert ui.free_port(port) > port

"""How `make ui` ends; what it shows is in tests/flows/workers/test_pages.py."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from flows.commands import ui
from flows.workers import server
from tests import toy_project as toy
from tests.waiting import wait_until


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


@pytest.mark.kills
def test_killed_make_ui_leaves_no_server(project, shown):
    lines = [shown.stdout.readline() for _ in range(3)]
    assert "Ctrl-C" in lines[2], lines
    os.kill(shown.pid, signal.SIGKILL)
    shown.wait()
    wait_until(lambda: toy.processes(project) == [], "the end of all servers")


def test_taken_port_is_passed_over():
    with socket.create_server((server.HOST, 0)) as taken:
        port = taken.getsockname()[1]
        assert ui.free_port(port) > port

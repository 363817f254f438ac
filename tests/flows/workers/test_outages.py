"""A server that is lost in the middle of a run: one wait, one line, and the same result."""

import http.server
import threading
import time
import uuid

import pytest
from prefect import flow, task
from prefect.context import refresh_global_settings_context
from prefect.runtime import flow_run

from flows.workers import connection, outages, stage

WAYS = ("refuses", "hangs", "answers 500", "is full")


class Api(http.server.BaseHTTPRequestHandler):
    """What Prefect's server says, as far as it is asked here: it is well, or ``way``."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        way = self.server.way
        self.server.asked += self.path.endswith("/health")
        if way == "hangs":
            self.server.ended.wait()
            self.close_connection = True
            return
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        healthy = self.path.endswith("/health") and way != "answers 500"
        known = healthy or way != "is full" or self.command != "GET"  # nothing was recorded
        self.send_response(200 if healthy else 500 if known else 404)
        body = b"true" if healthy else b"{}"
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_PATCH = do_GET  # noqa: N815

    def log_message(self, *_):
        pass


@pytest.fixture
def lost(project, monkeypatch):
    """A server that is well until it is lost in a ``way``; it is the run's of a stage."""
    monkeypatch.setattr(outages, "PATIENCE", 0.3)
    monkeypatch.setattr(outages, "CHECK", 0.1)
    monkeypatch.setattr(outages, "PAUSE", 0.05)
    monkeypatch.setattr(connection, "STOP_TIMEOUT", 1.0)
    monkeypatch.setattr(stage, "RECORD_TIMEOUT", 0.3)
    monkeypatch.setattr(stage, "LATE_RECORD_TIMEOUT", 0.1)
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api)
    served.daemon_threads, served.ended = True, threading.Event()
    served.way, served.asked = "", 0
    thread = threading.Thread(target=served.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{served.server_port}/api")
    monkeypatch.setenv(stage.PARENT_TASK_RUN, str(uuid.uuid4()))
    refresh_global_settings_context()

    def lose(way):
        served.way = way
        if way == "refuses":
            served.shutdown()
            served.server_close()
        return served

    yield lose
    served.ended.set()
    served.shutdown()
    thread.join()
    served.server_close()


@task
def work():
    return "done"


@pytest.mark.parametrize("way", WAYS)
def test_stages_of_a_run_share_one_wait(lost, way, capsys):
    ran = []

    @flow(name="first")
    def first(recipe):
        print("it goes on")
        ran.append((recipe, work(), flow_run.id))

    served = lost(way)
    began = time.monotonic()
    with outages.noted(connection.HOME):
        for _ in range(3):
            before = served.asked
            assert stage.run(first, "toy") == 0
        assert served.asked - before <= 2, "the last stage asks once more, and does not wait"

    assert ran == [("toy", "done", None)] * 3
    assert time.monotonic() - began < 10
    printed = capsys.readouterr()
    assert printed.out == "it goes on\n" * 3
    lines = printed.err.splitlines()
    said = [line for line in lines if "is away" in line]
    assert len(said) == (2 if way == "is full" else 1), lines
    assert all(f"{served.server_port}/api is away (" in line for line in said)
    assert not [*connection.HOME.glob("away-*")]

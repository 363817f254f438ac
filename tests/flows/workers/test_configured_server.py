"""What PREFECT_API_URL names is asked before Prefect is imported."""

import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flows.workers import configured_server
from tests import toy_project as toy


@contextmanager
def answering(status, content):
    """The address of a server that answers each request alike."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()


ANSWERS = {
    (200, b"<html></html>"): "is no Prefect server's API: correct it",
    (200, b"true"): "is no Prefect server's API",  # no version
    (404, b""): "is no Prefect server's API",
    (500, b"<html></html>"): "answers with the status 500: look at its log",
    (401, b""): "",
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_answers(answer):
    with answering(*answer) as address:
        fault = configured_server.fault(address)
    assert ANSWERS[answer] in fault
    assert bool(fault) == bool(ANSWERS[answer])


def test_server_that_can_be_used(api):
    assert configured_server.fault(api) == configured_server.fault(f"{api}/") == ""
    assert "no Prefect server" in configured_server.fault(api.removesuffix("api") + "other")


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:4200", "http://", "http://h:port/api"])
def test_no_address(address):
    assert "no address of a server: write http://host:port/api" in configured_server.fault(address)


def test_proxy_and_https_are_left_to_prefect(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert configured_server.fault("http://nosuch.invalid/api") == ""
    assert configured_server.fault("https://nosuch.invalid/api") == ""
    assert "nothing answers" in configured_server.fault("http://127.0.0.1:9/api")


def test_run_is_refused_without_prefect(project):
    environment = toy.environment(PREFECT_API_URL="nonsense", PYTHONPROFILEIMPORTTIME="1")
    command = [sys.executable, "-m", "flows.retrain", "toy", "--here"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    said = [line for line in ended.stderr.splitlines() if not line.startswith("import time:")]
    assert (ended.returncode, said) == (
        2,
        [
            "retrain: PREFECT_API_URL is nonsense, which is no address of a server: write "
            "http://host:port/api, or unset PREFECT_API_URL, and the run starts a server of its own"
        ],
    )
    assert not re.search(r"\|\s+prefect\b", ended.stderr), "the import of Prefect takes seconds"

"""vLLM's own server, as `make serve` starts it: sampled from, updated, killed and started again."""

import http.client
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from tasks.engines.vllm import engine as vllm
from tasks.engines.vllm import guard
from tasks.engines.vllm.connection import JSON, ROOT
from tests.vllm.conftest import SETTINGS, save
from tests.vllm.test_vllm import changed, check, same, sampled


@pytest.fixture(scope="module")
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(folder, port, log):
    """What `make serve POLICY=… PORT=…` runs."""
    words = ["--port", str(port), "--precision", "float32", "--memory", "0.25"]
    return subprocess.Popen(
        [sys.executable, "-m", "tasks.engines.vllm.serve", folder, *words],
        cwd=ROOT,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def end(server):
    """Kill the server with all of its processes."""
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


@pytest.fixture(scope="module")
def serving(make, port, tmp_path_factory):
    """A policy, and a function that starts the server anew; the server is ended afterwards."""
    model, made = make()
    running = []
    with (
        (tmp_path_factory.mktemp("server") / "log").open("wb") as log,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv(guard.TOKEN, "token of the tests")

        def restart():
            if running:
                end(running.pop())
            running.append(start(made.path, port, log))

        restart()
        yield model, made, restart
        end(running.pop())


def test_server_is_sampled_updated_and_restarted(serving, engine, tokenizer, port, tmp_path, capfd):
    model, made, restart = serving
    settings = SETTINGS.model_copy(update={"server": f"http://127.0.0.1:{port}"})
    vocabulary = model.config.vocab_size
    asked, samples = sampled(engine(model, made, tokenizer, settings), vocabulary)
    check(model, asked, samples)
    changed(model)
    other = save(model, tokenizer, tmp_path / "updated")
    held = engine(model, other, tokenizer, settings)
    asked, samples = sampled(held, vocabulary)
    check(model, asked, samples)
    restart()  # it knows the first policy only, until it is told
    _, again = sampled(held, vocabulary)
    assert same(again, samples)
    assert "restarting" in capfd.readouterr().out
    for call in ("POST /collective_rpc", "POST /sleep", "POST /reset_prefix_cache", "GET /health"):
        asked = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        asked.request(*call.split(), '{"method": "load_folder", "args": ["/"]}', JSON)
        assert asked.getresponse().status == 401, call
    _, again = sampled(held, vocabulary)
    assert same(again, samples)


@contextmanager
def another_kind():
    """A server that answers everything with 404."""
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_server_of_another_kind_is_refused(make, engine, tokenizer):
    model, made = make()
    with another_kind() as port:
        settings = SETTINGS.model_copy(update={"server": f"http://127.0.0.1:{port}"})
        with pytest.raises(ValueError, match=r"engine.server .*make serve"):
            sampled(engine(model, made, tokenizer, settings), model.config.vocab_size)


def test_server_that_never_answers_is_an_error(make, engine, tokenizer, port, monkeypatch):
    monkeypatch.setattr(vllm, "SERVER_WAIT", 0.2)
    monkeypatch.setattr(vllm, "RETRY_PAUSE", 0.1)
    model, made = make()
    settings = SETTINGS.model_copy(update={"server": "http://127.0.0.1:9"})
    with pytest.raises(RuntimeError, match=r"engine.server http://127.0.0.1:9"):
        sampled(engine(model, made, tokenizer, settings), model.config.vocab_size)

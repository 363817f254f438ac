"""vLLM's own server, as `make serve` starts it: sampled from, updated, killed and started again."""

import http.client
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from params.schema.teacher import ServerTeacher
from tasks.chat import FOLDER, teacher_scores
from tasks.engines import SamplingRequest
from tasks.engines.servers import token_guard
from tasks.engines.servers.client import JSON
from tasks.engines.servers.patience import Patience
from tasks.engines.turns import EngineDiedError
from tasks.engines.vllm.connection import ROOT
from tests.tasks.engines.servers.conftest import learned, unseen, weight_digest
from tests.vllm.conftest import SETTINGS, save
from tests.vllm.test_vllm import CLOSE, changed, check, same, sampled

pytestmark = pytest.mark.usefixtures("forks")  # but for the first server: see serving
PYTHON = sys.executable


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def port():
    return free_port()


def start(folder, port, log, python=None):
    """What `make serve POLICY=… PORT=…` runs."""
    words = ["--port", str(port), "--precision", "float32", "--memory", "0.25"]
    return subprocess.Popen(
        [python or sys.executable, "-m", "tasks.engines.vllm.serve", folder, *words],
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
        patch.setenv(token_guard.TOKEN, "token-of-the-tests")

        def restart():
            end(running.pop())
            running.append(start(made.path, port, log))

        running.append(start(made.path, port, log, PYTHON))  # with all that a user's server imports
        yield model, made, restart
        end(running.pop())


def test_server_is_sampled_updated_and_restarted(
    serving, engine, tokenizer, port, tmp_path, capfd, monkeypatch
):
    model, made, restart = serving
    settings = SETTINGS.model_copy(update={"servers": (f"http://127.0.0.1:{port}",)})
    vocabulary = model.config.vocab_size
    asked, samples = sampled(engine(model, made, tokenizer, settings), vocabulary)
    check(model, asked, samples)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    teaches(model, made.path, tokenizer, port)
    changed(model)
    other = save(model, tokenizer, tmp_path / "updated")
    held = engine(model, other, tokenizer, settings)
    asked, samples = sampled(held, vocabulary)
    check(model, asked, samples)
    restart()  # it knows the first policy only, until it is told
    _, again = sampled(held, vocabulary)
    assert same(again, samples)
    assert "sampled again" in capfd.readouterr().out
    for call in ("POST /collective_rpc", "POST /sleep", "POST /reset_prefix_cache", "GET /health"):
        asked = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        asked.request(*call.split(), '{"method": "load_folder", "args": ["/"]}', JSON)
        assert asked.getresponse().status == 401, call
    _, again = sampled(held, vocabulary)
    assert same(again, samples)


def test_a_warm_prefix_gives_a_fresh_servers_samples_after_an_update(
    serving, engine, make, tokenizer, port, tmp_path, monkeypatch
):
    _, _, restart = serving
    model, made = make(seed=6)
    settings = SETTINGS.model_copy(update={"servers": (f"http://127.0.0.1:{port}",)})
    better = learned(model)
    other = save(better, tokenizer, tmp_path / "updated")

    def samples(policy, artifact):
        return long_turns(engine(policy, artifact, tokenizer, settings), model.config.vocab_size)

    restart()
    fresh = samples(better, other)
    samples(model, made)
    held = engine(model, made, tokenizer, settings)
    [server] = held.fleet.servers
    server._worker("load_folder", other.path, made.digest)  # and leave the prefix cache as it is
    assert not close(long_turns(held, model.config.vocab_size), fresh), "prefixes were cached"
    server.load(Path(made.path), made.digest)
    for how in ("folder", "upload"):
        samples(model, made)
        old = server.weight_digest(NORM)
        if how == "upload":
            unseen(monkeypatch)
        assert close(samples(better, other), fresh), how
        assert server.weight_digest(NORM) == weight_digest(better, NORM) != old


def close(one, other):
    """Whether turns are equal, but for how sums of prompts that come together are rounded.

    Which of them come together is a matter of time.
    """
    return all(
        a.tokens.tolist() == b.tokens.tolist()
        and np.allclose(a.logprobs, b.logprobs, rtol=0, atol=CLOSE)
        and a.stopped == b.stopped
        for a, b in zip(one, other, strict=True)
    )


def teaches(model, folder, tokenizer, port):
    """Check that the log-probabilities of tokens that it is sent are plain transformers'."""
    url, key = f"http://127.0.0.1:{port}/v1", token_guard.TOKEN
    teacher = ServerTeacher(kind="server", url=url, name=folder, key_variable=key)
    ids = sorted(tokenizer.get_vocab().values())
    texts = [tokenizer.decode([token]) for token in range(ids[-1] + 1)]
    teacher_scores.check(teacher, ids, texts, "mine")
    row = np.array(ids[3:40], np.int32)
    found = teacher_scores.ask(teacher, {"row": row}, texts, "mine")["row"]
    with torch.no_grad():
        logits = model(torch.from_numpy(row).long()[None]).logits[0, :-1].float()
    own = logits.log_softmax(-1).gather(1, torch.from_numpy(row).long()[1:, None])[:, 0]
    np.testing.assert_allclose(found[1:], own.numpy(), rtol=0, atol=CLOSE)
    with pytest.raises(RuntimeError, match="the token 3 is"):
        teacher_scores.ask(teacher, {"row": row}, ["other"] * len(texts), "mine")


NORM = "model.norm.weight"  # a name that vLLM has, too: it lays others together


def long_turns(held, vocabulary):
    """Turns of prompts that fill a block of vLLM's cache, of 128 tokens on a CPU."""
    random = np.random.default_rng(0)
    with held.session(4, 240, 1.0, 1.0, ()) as session:
        prompts = [random.integers(3, vocabulary, 200).astype(np.int32) for _ in range(4)]
        return session.sample(
            [
                SamplingRequest(session.open(), tokens, 50 + i, 20)
                for i, tokens in enumerate(prompts)
            ]
        )


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
        settings = SETTINGS.model_copy(update={"servers": (f"http://127.0.0.1:{port}",)})
        with pytest.raises(ValueError, match=r"engine.servers: .*make serve"):
            sampled(engine(model, made, tokenizer, settings), model.config.vocab_size)


def test_server_that_never_answers_is_an_error(make, engine, tokenizer):
    model, made = make()
    settings = SETTINGS.model_copy(update={"servers": ("http://127.0.0.1:9",)})
    held = engine(model, made, tokenizer, settings)
    held.fleet.patience = Patience(total=0.2, first_pause=0.02)
    with pytest.raises(EngineDiedError, match=r"engine.servers: http://127.0.0.1:9"):
        sampled(held, model.config.vocab_size)


# ---------------------------------------------------------------- several servers


class Running:
    """Two servers that a test kills and starts again."""

    def __init__(self, folder, log):
        self.folder, self.log = folder, log
        self.ports = [free_port(), free_port()]
        self.running = {}

    @property
    def settings(self):
        addresses = tuple(f"http://127.0.0.1:{port}" for port in self.ports)
        return SETTINGS.model_copy(update={"servers": addresses})

    def start(self, number):
        self.running[number] = start(self.folder, self.ports[number], self.log)

    def kill(self, number):
        end(self.running.pop(number))


@pytest.fixture(scope="module")
def started(make, tmp_path_factory):
    """A policy and two servers that are started with it."""
    model, made = make(seed=3)
    with (
        (tmp_path_factory.mktemp("servers") / "log").open("wb") as log,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv(token_guard.TOKEN, "token-of-the-tests")
        servers = Running(made.path, log)
        yield model, made, servers
        for number in list(servers.running):
            servers.kill(number)


@pytest.fixture
def two(started, forks):
    """The same, both of them running."""
    servers = started[2]
    for number in range(2):
        if number not in servers.running:
            servers.start(number)
    return started


def test_trees_move_when_their_server_dies(two, engine, tokenizer, tmp_path, capfd):
    model, made, servers = two
    vocabulary = model.config.vocab_size
    _, expected = sampled(engine(model, made, tokenizer), vocabulary)
    held = engine(model, made, tokenizer, servers.settings)
    assert same(sampled(held, vocabulary)[1], expected), "by the one that was there first"
    wait_for(held.fleet, 2)
    held.fleet.homes.clear()
    assert same(sampled(held, vocabulary)[1], expected)
    assert len(set(held.fleet.homes.values())) == 2, "both have sampled"
    servers.kill(0)
    assert same(sampled(held, vocabulary)[1], expected)
    assert "sampled again" in capfd.readouterr().out
    changed(model)
    other = save(model, tokenizer, tmp_path / "updated")
    held = engine(model, other, tokenizer, servers.settings)
    asked, expected = sampled(held, vocabulary)  # by the other one alone
    check(model, asked, expected)
    servers.start(0)
    wait_for(held.fleet, 2)
    servers.kill(1)
    assert same(sampled(held, vocabulary)[1], expected), "it has got the weights of today"


def wait_for(held, count):
    """Wait until so many servers have the weights."""
    deadline = time.monotonic() + 300
    while len(held.up) < count:
        assert time.monotonic() < deadline
        with held.lock:
            held._collect()
            held._begin_loads(held.policy)
        time.sleep(0.2)


def test_stale_weights_are_refused(two, engine, make, tokenizer, capfd):
    model, _, servers = two
    _, made = make(seed=4)  # another policy, which somebody loads into one of the servers
    own = save(model, tokenizer, Path("own"))
    held = engine(model, own, tokenizer, servers.settings)
    _, expected = sampled(held, model.config.vocab_size)
    server = held.fleet.servers[0]
    server.load(Path(made.path), "of another run")
    _, again = sampled(held, model.config.vocab_size)
    assert same(again, expected)
    assert "answered with the weights 'of another run'" in capfd.readouterr().out
    assert held.fleet.stale[server] == 1

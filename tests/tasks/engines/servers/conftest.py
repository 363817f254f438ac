"""Servers of the transformers engine, each in a folder of its own."""

import copy
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tasks.engines.servers import token_guard, uploads
from tasks.engines.servers.client import EngineServer
from tasks.engines.servers.fleet import Fleet
from tasks.engines.servers.patience import Patience
from tasks.engines.servers.servers_engine import ServersEngine
from tasks.engines.turns import EngineDiedError
from tasks.engines.vllm.connection import ROOT
from tasks.ledger.artifacts import Artifact
from tests.forks import Forks

TOKEN = "token of the tests"
QUICK = Patience(first_pause=0.05)
SERVE = "tasks.engines.transformers.serve"


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Process:
    """A server that is started, killed and started again at the same port."""

    def __init__(self, policy, home):
        self.policy, self.home, self.port = policy, home, free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.start()

    def arguments(self):
        words = ["--port", str(self.port), "--precision", "float32", "--threads", "1"]
        return [str(self.policy), *words]

    def start(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", SERVE, *self.arguments()],
            cwd=self.home,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=(self.home / "log").open("ab"),
            stderr=subprocess.STDOUT,
        )

    def kill(self):
        """Kill it, and wait until it has ended."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def wait(self):
        """Wait until it answers."""
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(EngineDiedError):
                return EngineServer(self.address, "transformers").check()
            time.sleep(0.1)
        raise TimeoutError((self.home / "log").read_text())


class Forked(Process):
    """Such a server in a fork of a process that has imported its libraries."""

    def __init__(self, policy, home, forks):
        self.forks = forks
        super().__init__(policy, home)

    def start(self):
        self.process = self.forks.start(self.arguments(), self.home, self.home / "log")


def save(model, tokenizer, folder):
    """Save a policy; its artifact."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Artifact.at(folder)


@pytest.fixture(scope="module")
def made(policy, tokenizer, tmp_path_factory):
    """The artifact of the tiny policy."""
    return save(policy, tokenizer, tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def started(made, tmp_path_factory):
    """Two servers that were started with the policy, the second one by its command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(token_guard.TOKEN, TOKEN)
        patch.setenv("OMP_NUM_THREADS", "1")
        forks = Forks(SERVE)
        first, second = (tmp_path_factory.mktemp("server") for _ in range(2))
        both = [Forked(made.path, first, forks), Process(made.path, second)]
        yield both
        for server in both:
            server.kill()
        forks.close()


@pytest.fixture
def servers(started):
    """Two servers that answer; one that a test has killed is started again."""
    for server in started:
        if server.process.poll() is not None:
            server.start()
    for server in started:
        server.wait()
    return started


@pytest.fixture
def engine(tokenizer):
    """A function that opens an engine over servers for a policy, with a fleet of its own."""

    def opened(model, policy, servers, patience=QUICK):
        fleet = Fleet([server.address for server in servers], "transformers", patience)
        folder = Path(policy.path)
        return ServersEngine(fleet, 1, model, tokenizer, lambda: folder, policy.digest)

    return opened


def learned(policy):
    """The policy after one optimizer step with a gradient that is not zero."""
    model = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(3, 40)[None]
    model(tokens, labels=tokens).loss.backward()
    assert model.get_input_embeddings().weight.grad.norm() > 0
    optimizer.step()
    return model.eval()


def weight_digest(model, name):
    weight = model.get_parameter(name).detach().numpy()
    return hashlib.blake2b(weight.tobytes(), digest_size=16).hexdigest()


def unseen(monkeypatch):
    """Let the folder of the policy be one that servers do not see: they get another name of it."""
    post = EngineServer._post

    def renamed(server, path, body=None, seconds=None):
        if path == uploads.POLICIES:
            body = body | {"folder": "/not/on/that/machine"}
        return post(server, path, body, seconds)

    monkeypatch.setattr(EngineServer, "_post", renamed)

"""Tests of the vLLM engine against the real vLLM; `make test-vllm` gives them their environment."""

import importlib.util
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from params.schema.agent import EngineSettings
from params.schema.base import Machine
from tasks.engines.servers.servers_engine import fleet_at, open_servers
from tasks.engines.vllm import vllm_engine as engines
from tasks.ledger.artifacts import Artifact
from tasks.policy.resident import Learner
from tasks.policy.tiny import build_policy, build_tokenizer
from tests.conftest import TEXTS
from tests.vllm import forked

MACHINE = Machine(threads=2, device="cpu", precision="float32")
SETTINGS = EngineSettings(kind="vllm", memory=0.25, servers=(), lanes=1)
ROWS = 32


FORKING = pytest.StashKey[ExitStack]()


def pytest_configure(config):
    if not importlib.util.find_spec("vllm"):
        pytest.exit("vLLM is not installed here: `make test-vllm` has it", returncode=1)
    if not hasattr(config, "workerinput"):
        config.stash[FORKING] = ExitStack()
        folder = tempfile.TemporaryDirectory(prefix="beamline-")  # a short path, for a socket
        here = Path(config.stash[FORKING].enter_context(folder))
        config.stash[FORKING].enter_context(forked.standing_in(here))


def pytest_unconfigure(config):
    if FORKING in config.stash:
        config.stash[FORKING].close()


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Engines write their words below the working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def forks(monkeypatch):
    """Have the programs of vLLM that this test starts forked with vLLM imported."""
    for name, value in forked.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", os.environ[forked.PROGRAM])


@pytest.fixture(scope="session")
def tokenizer(tiny):
    return build_tokenizer(TEXTS * 10, tiny)


@pytest.fixture(scope="session")
def make(tiny, tokenizer, tmp_path_factory):
    """A function that makes a policy of random weights; the model and its folder's artifact."""

    def made(seed=0, tied=True, tokenizer=tokenizer, **changes):
        # vLLM on a CPU has no attention for heads of less than 32
        sizes = tiny.model_copy(update={"hidden": 64, **changes})
        model = build_policy(sizes, tokenizer, seed).eval()
        if not tied:
            model.config.tie_word_embeddings = False
            model = type(model)(model.config).eval()
        return model, save(model, tokenizer, tmp_path_factory.mktemp("policy"))

    return made


def save(model, tokenizer, folder):
    """Save a policy; its artifact."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Artifact.at(folder)


@pytest.fixture(scope="module")
def engine():
    """The engine of this process with a policy, as rollouts ask for it; ended afterwards."""

    def opened(model, made, tokenizer, settings=SETTINGS, machine=MACHINE):
        folder = Path(made.path)
        if settings.servers:
            return open_servers(settings, Learner(folder, model, tokenizer), made)
        return engines.vllm_engine(
            settings, machine, ROWS, model, tokenizer, lambda: folder, made.digest
        )

    yield opened
    engines.close_engines()
    fleet_at.cache_clear()

"""A session in a process of its own: the same samples, and an end whatever happens."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from tasks.engines import SamplingRequest
from tasks.engines.transformers import sampling_worker
from tasks.engines.transformers.transformers_engine import TransformersEngine, WorkerEngine
from tests.trees import small_policy
from tests.waiting import LONGEST

CONTEXT = 60


@pytest.fixture
def engine(tokenizer):
    return TransformersEngine(small_policy(vocabulary=len(tokenizer)).eval(), tokenizer)


@pytest.fixture(scope="module")
def pool():
    """Workers that the tests of this file share."""
    opened = sampling_worker.WorkerPool()
    yield opened
    opened.close()


@pytest.fixture
def apart(engine, pool):
    """The engine whose sessions run in a worker."""
    return WorkerEngine(engine, pool)


def open_session(engine, paths=6):
    return engine.session(paths, CONTEXT, 0.8, 0.9, ("e", "</python>"))


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(3, 290, length).astype(np.int32)


def play(session):
    """Two turns of some paths, with a fork and a path that is given up in between."""
    paths = [session.open() for _ in range(4)]
    first = session.sample([SamplingRequest(path, prompt(5 + 3 * path), path, 9) for path in paths])
    session.close(paths.pop(1))
    branch = session.fork(paths[0])
    contexts = [np.concatenate([prompt(5 + 3 * path), prompt(4, path)]) for path in paths]
    later = [SamplingRequest(p, c, 50 + p, 7) for p, c in zip(paths, contexts, strict=True)]
    return [*first, *session.sample([*later, SamplingRequest(branch, contexts[0], 99, 7)])]


def bits(samples):
    return [
        (s.tokens.tobytes(), s.logprobs.tobytes(), s.entropies.tobytes(), s.stopped)
        for s in samples
    ]


def test_samples_equal_a_local_sessions_bit_by_bit(engine, apart):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with open_session(engine) as here, open_session(apart) as there:
            assert bits(play(here)) == bits(play(there))
    finally:
        torch.set_num_threads(threads)


def test_worker_is_reused_with_present_weights(engine, apart):
    with open_session(apart) as session:
        process = session.worker.process
        before = bits(play(session))
    with torch.no_grad():
        engine.model.get_input_embeddings().weight.mul_(1.5)
    with open_session(apart) as session, open_session(engine) as here:
        assert session.worker.process is process
        after = bits(play(session))
        assert after == bits(play(here)) != before


def test_open_sessions_have_a_worker_each(apart):
    with open_session(apart) as one, open_session(apart) as other:
        assert one.worker.process.pid != other.worker.process.pid
        assert bits(play(one)) == bits(play(other))


def test_refusals_of_the_session_are_raised_here(apart):
    with open_session(apart, paths=1) as session:
        path = session.open()
        with pytest.raises(ValueError, match="the session has 60") as refused:
            session.sample([SamplingRequest(path, prompt(55), 0, 9)])
        assert "cache.py" in refused.value.__notes__[0]  # where it happened
        assert len(session.sample([SamplingRequest(path, prompt(5), 0, 2)])) == 1
        session.open()
        with pytest.raises(RuntimeError, match="all 1 paths"):
            session.sample([SamplingRequest(path, prompt(5), 0, 2)])


def test_long_context_is_refused_before_a_start(engine):
    apart = WorkerEngine(engine, pool=None)
    with pytest.raises(ValueError, match="longer context"), apart.session(1, 10**6, 1.0, 1.0, ()):
        pass


def test_dead_worker_raises_and_is_replaced(apart):
    with (
        pytest.raises(RuntimeError, match=r"has ended \(status -9; .*call again"),
        open_session(apart) as session,
    ):
        dead = session.worker.process
        dead.kill()
        play(session)
    with open_session(apart) as session:
        assert session.worker.process.pid != dead.pid
        assert len(play(session)) == 8


def test_worker_that_died_idle_is_replaced(apart):
    with open_session(apart) as session:
        dead = session.worker.process
    dead.kill()
    dead.wait()
    with open_session(apart) as session:
        assert session.worker.process.pid != dead.pid
        assert len(play(session)) == 8


def test_an_error_in_a_session_ends_its_worker(apart):
    with pytest.raises(KeyError), open_session(apart) as session:
        raise KeyError("in the middle")
    assert session.worker.process.returncode == -signal.SIGKILL


TRAINER = """
from tasks.engines.transformers import sampling_worker
print(sampling_worker.start().process.pid, flush=True)
input()
"""


def test_worker_ends_with_a_killed_trainer():
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=sampling_worker.ROOT,
    )
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    os.kill(pid, 0)  # it lives
    trainer.kill()
    trainer.communicate()
    deadline = time.monotonic() + LONGEST
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the worker is still there")

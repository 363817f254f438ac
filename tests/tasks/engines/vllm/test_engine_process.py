"""vLLM's process on a fake vLLM: it answers each call, whatever ends first, and reports faults."""

import contextlib
import importlib
import pickle
import socket
import sys
import threading
from multiprocessing.connection import Connection
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from tasks.engines.turns import TurnRequest
from tasks.engines.vllm.messages import EngineFault

PROCESS = "tasks.engines.vllm.engine_process"


ERRORS = {
    777: KeyError("sinks"),
    778: RuntimeError("Unsupported CPU attention configuration: head_dim=16"),
    779: ValueError("No available memory for the cache blocks"),
}


class FakeArguments(dict):
    """The arguments of an engine."""

    def create_engine_config(self):
        return self


class FakeEngine:
    """An LLMEngine that ends one request a step, the last one first."""

    def __init__(self):
        self.requests = []

    def collective_rpc(self, method, args=()):
        return [(method, *args)]

    def add_request(self, name, prompt, options):
        if options["max_tokens"] < 1:
            raise ValueError("no tokens")
        self.requests.append((name, prompt, options["seed"]))

    def step(self):
        name, prompt, seed = self.requests.pop()
        if seed == 666:
            raise RuntimeError("CUDA error")
        if seed in ERRORS:
            raise ERRORS[seed]
        tokens = [*prompt[:2], seed]
        pairs = [[-0.5, 0.25]] * len(tokens)
        found = SimpleNamespace(token_ids=tokens, logprobs=SimpleNamespace(logprobs=pairs))
        unfinished = SimpleNamespace(finished=False)
        return [unfinished, SimpleNamespace(finished=True, request_id=name, outputs=[found])]


@pytest.fixture
def channel(monkeypatch):
    """A channel to ``process.main``, which runs in a thread on a fake vLLM."""
    engine = FakeEngine()
    vllm, inputs = ModuleType("vllm"), ModuleType("vllm.inputs")
    vllm.EngineArgs, vllm.SamplingParams = FakeArguments, dict
    vllm.LLMEngine = SimpleNamespace(from_vllm_config=lambda config, disable_log_stats: engine)
    inputs.TokensPrompt = lambda prompt_token_ids: prompt_token_ids
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.inputs", inputs)
    process = importlib.import_module(PROCESS)
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=run, args=(process.main, theirs.detach()))
    thread.start()
    with Connection(ours.detach()) as opened:
        opened.send_bytes(pickle.dumps({"model": "folder"}))
        assert receive(opened) == (0, None)
        yield opened
    thread.join()
    sys.modules.pop(PROCESS)  # it has imported the fake


def run(main, descriptor):
    """Run the process; its error has been sent."""
    with contextlib.suppress(RuntimeError, ValueError, KeyError):
        main(descriptor)


def turns(*seeds, max_tokens=3):
    tokens = np.array([7, 8, 9], np.int32)
    return [TurnRequest(tokens, seed, max_tokens, 1.0, 1.0, (), (0,), ()) for seed in seeds]


def send(channel, number, name, *arguments):
    channel.send_bytes(pickle.dumps((number, name, arguments)))


def receive(channel):
    return pickle.loads(channel.recv_bytes())


def test_calls_get_their_own_turns_in_order(channel):
    send(channel, 1, "sample", *turns(10, 11, 12))
    send(channel, 2, "sample", *turns(20))
    send(channel, 3, "worker", "policy")
    answers = dict(receive(channel) for _ in range(3))
    assert [int(tokens[-1]) for tokens, _, _ in answers[1]] == [10, 11, 12]
    [(tokens, logprobs, entropies)] = answers[2]
    assert tokens.tolist() == [7, 8, 20]
    assert logprobs.tolist() == [-0.5] * 3 and entropies.tolist() == [0.25] * 3
    assert answers[3] == ("policy",)


def test_a_refused_call_is_answered_and_the_next_works(channel):
    send(channel, 1, "sleep", 2)  # the fake cannot
    number, error = receive(channel)
    assert number == 1 and "AttributeError" in str(error) and error.__notes__
    send(channel, 2, "sample", *turns(5))
    assert receive(channel)[0] == 2


def test_a_fault_reaches_every_pending_call(channel):
    send(channel, 1, "sample", *turns(666, 666))
    number, fault = receive(channel)
    assert (number, type(fault)) == (1, EngineFault) and "CUDA error" in fault.reason
    with pytest.raises((EOFError, ConnectionError)):
        receive(channel)


def test_a_turn_that_cannot_be_added_is_an_error(channel):
    send(channel, 1, "sample", *turns(1), *turns(2, max_tokens=0))
    number, error = receive(channel)
    assert number == 1 and "no tokens" in str(error)
    with pytest.raises((EOFError, ConnectionError)):
        receive(channel)


@pytest.mark.parametrize(("seed", "words"), [(777, "sinks"), (778, "Unsupported")])
def test_code_that_fails_at_once_refuses_the_policy(channel, seed, words):
    send(channel, 1, "sample", *turns(seed))
    number, error = receive(channel)
    assert (number, type(error)) == (1, ValueError)
    assert "cannot sample this policy" in str(error) and words in str(error)


def test_lack_of_memory_refuses_no_policy(channel):
    send(channel, 1, "sample", *turns(779))
    number, fault = receive(channel)
    assert (number, type(fault)) == (1, EngineFault) and "memory" in fault.reason


def test_code_that_fails_after_a_token_is_a_fault(channel):
    send(channel, 1, "sample", *turns(5))
    assert receive(channel)[0] == 1
    send(channel, 2, "sample", *turns(777))
    number, fault = receive(channel)
    assert (number, type(fault)) == (2, EngineFault) and "sinks" in fault.reason

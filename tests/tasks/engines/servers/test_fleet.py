"""Two real servers of the transformers engine: sampled from, updated, killed, and gone stale."""

import copy
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from params.schema.agent import Dialogue
from params.schema.reinforce import Rollout
from tasks.engines import SamplingRequest
from tasks.engines.servers import fleet, token_guard
from tasks.engines.servers.client import (
    TRANSFER,
    EngineServer,
    ServerFailedError,
    StaleWeightsError,
)
from tasks.engines.servers.patience import Patience
from tasks.engines.servers.weights_check import Reference, difference, digest_of, prompt_of
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.engines.turns import EngineDiedError
from tasks.ledger.artifacts import Artifact
from tasks.policy import token_ids
from tasks.rollouts.rounds import grow
from tasks.trees.outcomes import StopReason
from tasks.trees.tables import save_trees
from tasks.trees.tree import Observation, Question
from tests.agents import setting_of
from tests.tasks.engines.servers.conftest import learned, save, unseen, weight_digest
from tests.waiting import LONGEST

DIALOGUE = Dialogue(system="", turn_tokens=24, result_tokens=8, response_tokens=60, tool_calls=3)
BUDGET = Rollout(
    leaves=6,
    initial=3,
    branch=2,
    marks_per_rollout=1,
    entropy_window=5,
    base_probability=0.5,
    entropy_weight=0.2,
    threshold=0.4,
    draw=False,
    temperature=1.0,
    rows=12,  # two questions at a time, so that both servers sample and there is more than a round
)
NAMES = ("apples", "baskets", "cows", "doves", "eggs", "figs")
QUESTIONS = [Question(name, "toy", f"{name}?", ("1",)) for name in NAMES]
CLOSE = 1e-5  # float32, other orders of summation: a batch there has other rows than one here


def setting(tokenizer):
    tools = {"python": lambda texts: [Observation("ok", "7") for _ in texts]}
    return setting_of(tokenizer, DIALOGUE, BUDGET, tools, "0/0", "entropy")


def digest(trees, folder):
    save_trees(trees, folder)
    return Artifact.at(folder).digest


def requests(session, vocabulary, count=24, seed=0):
    random = np.random.default_rng(seed)
    contexts = [random.integers(3, vocabulary, 20 + i).astype(np.int32) for i in range(count)]
    return [
        SamplingRequest(session.open(), tokens, 2**63 + i, 30) for i, tokens in enumerate(contexts)
    ]


def sampled(engine, vocabulary, temperature=1.0, top_p=1.0, stop=(), count=24):
    with engine.session(count, 120, temperature, top_p, stop) as session:
        return session.sample(requests(session, vocabulary, count))


def same(one, other):
    return all(
        (a.tokens == b.tokens).all() and (a.logprobs == b.logprobs).all() and a.stopped == b.stopped
        for a, b in zip(one, other, strict=True)
    )


def check_close(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.stopped == b.stopped
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=CLOSE)
        np.testing.assert_allclose(a.entropies, b.entropies, atol=CLOSE)


def wait_for(held, count):
    """Wait until so many servers have the weights."""
    deadline = time.monotonic() + LONGEST
    while len(held.up) < count:
        assert time.monotonic() < deadline
        with held.lock:
            held._collect()
            held._begin_loads(held.policy)
        time.sleep(0.1)


# "nd" is in the text of the end token, too: there it ends no turn
@pytest.mark.parametrize("stop", [("nd", "</python>"), ("o", "</python>"), ()], ids=str)
def test_servers_sample_what_the_engine_here_samples(
    servers, engine, policy, made, tokenizer, stop
):
    vocabulary = policy.config.vocab_size
    here = sampled(TransformersEngine(policy, tokenizer), vocabulary, 0.7, 0.9, stop)
    held = engine(policy, made, servers)
    there = sampled(held, vocabulary, 0.7, 0.9, stop)
    check_close(here, there)
    assert {turn.stopped for turn in there} == (set(StopReason) if stop else ENDS)
    wait_for(held.fleet, 2)
    assert same(sampled(held, vocabulary, 0.7, 0.9, stop), there), "by whichever server"


ENDS = {StopReason.END, StopReason.LENGTH}


@pytest.mark.parametrize("how", ["folder", "upload"])
def test_new_weights_are_those_of_the_learner_and_leave_nothing_of_the_old(
    servers, engine, policy, made, tokenizer, tmp_path, monkeypatch, how
):
    vocabulary, name = policy.config.vocab_size, "model.embed_tokens.weight"
    sampled(
        engine(policy, made, servers), vocabulary, count=6
    )  # contexts that are known to the old weights
    model = learned(policy)
    other = save(model, tokenizer, tmp_path / "updated")
    held = engine(model, other, servers)
    if how == "upload":
        unseen(monkeypatch)
    after = sampled(held, vocabulary, count=6)
    wait_for(held.fleet, 2)
    check_close(after, sampled(TransformersEngine(model, tokenizer), vocabulary, count=6))
    new, old = (weight_digest(one, name) for one in (model, policy))
    for server in held.fleet.servers:
        assert server.weight_digest(name) == new != old
        fresh = SimpleNamespace(address=server.name)
        server.load(Path(made.path), made.digest)
        assert server.weight_digest(name) == old
        assert same(sampled(engine(model, other, [fresh]), vocabulary, count=6), after)


def test_stale_server_is_refused_and_given_the_right_weights(
    servers, engine, policy, made, tokenizer, tmp_path, monkeypatch, capfd
):
    vocabulary = policy.config.vocab_size
    other = save(learned(policy), tokenizer, tmp_path / "other")
    held = engine(policy, made, servers[:1])
    expected = sampled(held, vocabulary, count=6)
    [server] = held.fleet.servers
    server.load(Path(other.path), "of another run")
    assert same(sampled(held, vocabulary, count=6), expected)
    assert "answered with the weights 'of another run'" in capfd.readouterr().out
    check = EngineServer.check_weights

    def shared(server, policy):
        """Another run loads its own weights each time that this run has proven its own."""
        check(server, policy)
        server._worker("load_folder", other.path, "of another run")

    monkeypatch.setattr(EngineServer, "check_weights", shared)
    server._worker("load_folder", other.path, "of another run")
    with pytest.raises(RuntimeError, match="does another run use it"):
        for _ in range(2 * fleet.STALE):
            sampled(held, vocabulary, count=6)


def test_other_weights_under_the_right_name_are_loaded_anew(
    servers, engine, policy, made, tokenizer, tmp_path
):
    vocabulary = policy.config.vocab_size
    other = save(learned(policy), tokenizer, tmp_path / "other")
    held = engine(policy, made, servers[:1])
    expected = sampled(held, vocabulary, count=6)
    [server], described = held.fleet.servers, held.fleet.policy
    server._worker("load_folder", other.path, made.digest)
    with pytest.raises(StaleWeightsError, match=f"{server.name}: .* by its digest"):
        server.check_weights(described)
    unlike = Reference({}, described.reference.logprobs - 1)
    with pytest.raises(StaleWeightsError, match="1 nats from the learner's"):
        server.check_weights(replace(described, reference=unlike))
    held.fleet._take_down(server, ServerFailedError(server.name, "it has failed"))
    assert same(sampled(held, vocabulary, count=6), expected)
    server.check_weights(described)


def test_weights_in_bfloat16_are_the_learners(servers, engine, policy, made, tmp_path):
    """A server's precision is not the learner's: the digests of rounded weights count, too."""
    held = engine(policy, made, servers[:1])
    described = held._described()
    rounded = copy.deepcopy(policy).to(torch.bfloat16)
    given = {name: digest_of(rounded.get_parameter(name)) for name in described.reference.digests}
    logits = rounded(torch.from_numpy(prompt_of(policy.config.vocab_size)).long()[None]).logits
    logprobs = logits[0, -1].detach().float().log_softmax(-1)

    def drawn(shift):
        return [([token], [float(logprobs[token]) + shift], [0.5]) for token in range(5, 8)]

    assert difference(described.reference, given.get, lambda: drawn(0)) is None
    assert "nats" in difference(described.reference, given.get, lambda: drawn(-1))


def test_ids_without_a_token_are_left_out(servers, engine, policy, tokenizer, tmp_path):
    model, rows = copy.deepcopy(policy), len(tokenizer) + 20
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():  # one of two opposite rows is the likeliest after any context
        weight = model.get_output_embeddings().weight
        weight[len(tokenizer) :] = 50 * torch.cat([weight[5:15], -weight[5:15]])
    token_ids.note(model, tokenizer)
    held = engine(model, save(model, tokenizer, tmp_path / "padded"), servers)
    samples = sampled(held, len(tokenizer), temperature=5.0, count=6)
    assert all((sample.tokens < len(tokenizer)).all() for sample in samples)
    here = TransformersEngine(model, tokenizer)
    check_close(samples, sampled(here, len(tokenizer), temperature=5.0, count=6))


def test_server_needs_the_token(servers, made, monkeypatch):
    monkeypatch.setenv(token_guard.TOKEN, "another token, that it does not know")
    stranger = EngineServer(servers[0].address, "transformers")
    for call in (
        stranger.check,
        lambda: stranger.load(Path(made.path), made.digest),
        lambda: stranger.weight_digest("lm_head.weight"),
    ):
        with pytest.raises(ValueError, match="refuses this run"):
            call()


def test_server_of_another_kind_is_refused(servers, made):
    asked = EngineServer(servers[0].address, "vllm")
    with pytest.raises(ValueError, match=r"is no server of engine.kind vllm .*make serve"):
        asked.load(Path(made.path), made.digest)


def test_servers_that_never_answer_are_an_error(engine, policy, made):
    gone = SimpleNamespace(address="http://127.0.0.1:9")
    held = engine(policy, made, [gone], Patience(total=0.2, first_pause=0.02))
    with pytest.raises(EngineDiedError, match=r"engine.servers: http://127.0.0.1:9: .* refused"):
        sampled(held, policy.config.vocab_size)


@pytest.mark.parametrize(("kind", "chosen"), [("vllm", "ncll"), ("transformers", "nccl")])
def test_way_of_weights_that_servers_lack_is_an_error(monkeypatch, kind, chosen):
    monkeypatch.setenv(TRANSFER, chosen)
    with pytest.raises(ValueError, match=f"BEAMLINE_TRANSFER is '{chosen}', .* {kind} by files"):
        EngineServer("http://127.0.0.1:1", kind)


# ---------------------------------------------------------------- kills; each costs a start


def test_server_killed_in_a_turn_has_its_turns_sampled_elsewhere(servers, engine, policy, made):
    vocabulary = policy.config.vocab_size
    held = engine(policy, made, servers)
    whole = sampled(held, vocabulary)
    wait_for(held.fleet, 2)
    held.fleet.homes.clear()
    servers[0].process.send_signal(signal.SIGSTOP)  # in the middle of it, for as long as we like
    threading.Timer(0.5, servers[0].kill).start()
    assert same(sampled(held, vocabulary), whole)


def watched(chosen, notify):
    """A setting that tells which turn is being read, from 1."""
    read, count = chosen.dialect.read, iter(range(1, 10**6))

    def noticed(*turn):
        notify(next(count))
        return read(*turn)

    chosen.dialect.read = noticed
    return chosen


def test_servers_killed_once_each_give_the_trees_of_an_unbroken_fleet(
    servers, engine, policy, made, tokenizer, tmp_path, capfd
):
    first, second = servers
    alone = grow(QUESTIONS, engine(policy, made, [second]), setting(tokenizer))
    whole = digest(alone, tmp_path / "alone")
    held = engine(policy, made, servers)
    held.fleet.load(held._described, held.digest)
    wait_for(held.fleet, 2)
    homes = []

    def at_a_turn(number):  # the first dies between rounds, the second when the first is back
        homes.append(set(held.fleet.homes.values()))
        if number == 1:
            first.kill()
        if number == 8:
            first.start()
            first.wait()
            wait_for(held.fleet, 2)
            second.kill()

    killing = watched(setting(tokenizer), at_a_turn)
    assert digest(grow(QUESTIONS, held, killing), tmp_path / "killed") == whole
    assert len(homes[0]) == 2 and len(homes) > 30, "both had trees"
    assert capfd.readouterr().out.count("are sampled again") == 2

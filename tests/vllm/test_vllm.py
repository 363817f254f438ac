"""What vLLM samples is what the policy says, before and after an update, whatever dies."""

import json
import os
import signal
import string
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tokenizers import Tokenizer

from params.schema.agent import Dialogue
from params.schema.reinforce import Lora, Rollout
from tasks.engines import SamplingRequest, turns
from tasks.engines.vllm import connection
from tasks.ledger.artifacts import Artifact
from tasks.policy import adapter, checkpoint, resident, token_ids
from tasks.policy.tiny import build_tokenizer
from tasks.policy.token_ids import TokenIds
from tasks.rollouts.rounds import grow
from tasks.trees import dialogue as talk
from tasks.trees.dialogue import TAGS
from tasks.trees.outcomes import StopReason
from tasks.trees.tree import TURN, Observation, Question
from tests.agents import setting_of
from tests.conftest import TEXTS
from tests.vllm.conftest import SETTINGS, save

pytestmark = pytest.mark.usefixtures("forks")
PYTHON = sys.executable  # which imports vLLM for each process anew
CLOSE = 1e-5  # float32, other orders of summation
CONTEXT, NEW = 120, 40


def requests(handles, vocabulary, seed=0):
    random = np.random.default_rng(seed)
    return [
        SamplingRequest(
            handle, random.integers(3, vocabulary, 20 + i).astype(np.int32), 100 + i, NEW
        )
        for i, handle in enumerate(handles)
    ]


def sampled(engine, vocabulary, count=6, temperature=1.0, top_p=1.0, chosen=None):
    """Turns of some prompts, and the prompts."""
    with engine.session(count, CONTEXT, temperature, top_p, talk.STOP_STRINGS) as session:
        asked = requests([session.open() for _ in range(count)], vocabulary)
        asked = asked if chosen is None else [asked[i] for i in chosen]
        return asked, session.sample(asked)


@torch.no_grad()
def measured(model, asked, sample, temperature):
    """Log-probabilities and entropies of a turn, as transformers computes them."""
    tokens = torch.from_numpy(np.concatenate([asked.tokens, sample.tokens])).long()[None]
    ids = token_ids.of(model)
    logprobs = (ids.only(model(tokens).logits[0]) / temperature).log_softmax(-1)
    logprobs = logprobs[len(asked.tokens) - 1 : -1]
    chosen = logprobs.gather(-1, torch.from_numpy(sample.tokens).long()[:, None])[:, 0]
    entropies = -(logprobs.exp() * logprobs).sum(-1) / np.log(ids.count)
    return chosen.numpy(), entropies.numpy()


def check(model, asked, samples, temperature=1.0, close=CLOSE):
    for one, sample in zip(asked, samples, strict=True):
        logprobs, entropies = measured(model, one, sample, temperature)
        np.testing.assert_allclose(sample.logprobs, logprobs, atol=close)
        np.testing.assert_allclose(sample.entropies, entropies, atol=close)


def changed(model, spread=0.05):
    """Other weights, in place."""
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(spread * torch.randn_like(weight))


SHAPES = ({}, {"tied": False}, {"hidden": 128, "heads": 4})


def test_logprobs_follow_the_policys_updates_and_shapes(engine, make, tokenizer, tmp_path):
    """A policy of another shape restarts vLLM, an update does not."""
    processes = []
    for shape in SHAPES:
        model, made = make(**shape)
        vocabulary = model.config.vocab_size
        check(model, *sampled(engine(model, made, tokenizer), vocabulary))
        process = engine(model, made, tokenizer).connection.process
        assert process not in processes
        processes.append(process)
        changed(model)
        other = save(model, tokenizer, tmp_path / f"updated {len(processes)}")
        asked, samples = sampled(engine(model, other, tokenizer), vocabulary)
        check(model, asked, samples)
        assert engine(model, other, tokenizer).connection.process is process, "it goes on"
        in_evaluation = sampled(engine(model, other, tokenizer), vocabulary, 6, 0.7, 0.9)
        check(model, *in_evaluation, temperature=0.7)


@torch.no_grad()
def padded(model, tokenizer):
    """The policy with 20 rows without a token; of two opposite ones one is always the likeliest."""
    tokens = len(tokenizer)
    model.resize_token_embeddings(tokens + 20, mean_resizing=False)
    weight = model.get_output_embeddings().weight
    weight[tokens:] = 50 * torch.cat([weight[5:15], -weight[5:15]])
    token_ids.note(model, tokenizer)


@pytest.mark.parametrize("holes", [(), (20, 21)])
def test_ids_without_a_token_are_never_drawn(engine, make, tokenizer, tmp_path, holes):
    """Before and after an update, and at a high temperature."""
    model, _ = make()
    padded(model, tokenizer)
    model.token_ids = ids = TokenIds(len(tokenizer), holes)
    made = save(model, tokenizer, tmp_path / "first")
    for name in ("first", "second"):
        held = engine(model, made, tokenizer)
        asked, samples = sampled(held, len(tokenizer), temperature=2.0)
        assert all(token in ids for sample in samples for token in sample.tokens.tolist())
        check(model, asked, samples, temperature=2.0)
        changed(model, 0.01)
        made = save(model, tokenizer, tmp_path / f"after {name}")


def test_weights_from_a_folder_are_those_from_memory(engine, make, tokenizer, tmp_path):
    model, made = make()
    held = engine(model, made, tokenizer)
    sampled(held, model.config.vocab_size)
    changed(model)
    other = save(model, tokenizer, tmp_path / "updated")
    held.connection.call("worker", "load_folder", other.path)
    held.connection.call("reset_prefix_cache")
    held.loaded = other.digest
    check(model, *sampled(engine(model, other, tokenizer), model.config.vocab_size))


def test_adapter_is_sampled_merged(engine, make, tokenizer, tmp_path):
    model, made = make()
    learning = resident.Learner(Path(made.path), model, tokenizer)
    adapter.attach(model, Lora(rank=4, alpha=8, modules=("q_proj", "down_proj")), made, seed=3)
    processes = set()
    for name in ("first", "second"):
        changed_adapter(model)
        checkpoint.save(learning, tmp_path / name)
        policy = Artifact.at(tmp_path / name / checkpoint.POLICY)
        held = engine(model, policy, tokenizer)
        held.folder = partial(checkpoint.whole, policy)
        check(model, *sampled(held, model.config.vocab_size))
        processes.add(held.connection.process.pid)
    assert len(processes) == 1, "the second one was put in place"


@torch.no_grad()
def changed_adapter(model):
    torch.manual_seed(7)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.add_(0.1 * torch.randn_like(weight))


def same(one, other):
    return all(
        (a.tokens == b.tokens).all() and (a.logprobs == b.logprobs).all() and a.stopped == b.stopped
        for a, b in zip(one, other, strict=True)
    )


def test_a_turn_depends_on_its_seed_alone(engine, make, tokenizer):
    model, made = make()
    held = engine(model, made, tokenizer)
    vocabulary = model.config.vocab_size
    _, every = sampled(held, vocabulary)
    _, some = sampled(held, vocabulary, chosen=[4, 1])
    assert same(some, [every[4], every[1]])
    held.close()
    _, again = sampled(held, vocabulary)
    assert same(again, every)


def test_turn_ends_at_its_stop_string(engine, make, tokenizer):
    model, made = make()
    _, samples = sampled(engine(model, made, tokenizer), model.config.vocab_size, count=24)
    assert {StopReason.STOP, StopReason.LENGTH} <= {sample.stopped for sample in samples}
    for sample in samples:
        text = tokenizer.decode(sample.tokens)
        stops = [text.find(stop) for stop in talk.STOP_STRINGS if stop in text]
        assert (sample.stopped == StopReason.STOP) == bool(stops)
        assert (sample.stopped == StopReason.END) == (sample.tokens[-1] == tokenizer.eos_token_id)
        assert (sample.stopped != StopReason.LENGTH) or len(sample.tokens) == NEW
        if stops:
            before = tokenizer.decode(sample.tokens[:-1])
            assert not any(stop in before for stop in talk.STOP_STRINGS)


def without_tags(tiny):
    """A tokenizer as ours, that splits tags as any other text."""
    tokenizer = build_tokenizer(TEXTS * 10, tiny)
    content = json.loads(tokenizer._tokenizer.to_str())
    tags = [entry for entry in content["added_tokens"] if entry["content"] in TAGS]
    content["added_tokens"] = [e for e in content["added_tokens"] if e not in tags]
    return type(tokenizer)(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), eos_token="<|end|>"
    )


def test_tags_of_several_tokens_are_found_in_the_text(engine, make, tiny):
    """A tokenizer that knows no tags, as most policies have; pairs of letters stand for them."""
    letters = without_tags(tiny)
    model, made = make(tokenizer=letters)
    held = engine(model, made, letters)
    pairs = [a + b for a in string.ascii_lowercase for b in string.ascii_lowercase]
    assert turns.stop_texts(held.pieces(), talk.STOP_STRINGS) == talk.STOP_STRINGS
    with held.session(40, CONTEXT, 1.0, 1.0, pairs) as session:
        handles = [session.open() for _ in range(40)]
        samples = session.sample(requests(handles, model.config.vocab_size))
    assert {StopReason.STOP, StopReason.LENGTH} <= {sample.stopped for sample in samples}
    for sample in samples:
        end = letters.eos_token_id  # whose text is no text of the turn
        texts = ["" if token == end else held.pieces()[token] for token in sample.tokens]
        found = [
            place
            for place in range(len(texts))
            if any(p in "".join(texts[: place + 1]) for p in pairs)
        ]
        assert (sample.stopped == StopReason.STOP) == bool(found)
        assert not found or len(texts) == found[0] + 1


# ---------------------------------------------------------------- trees

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
    rows=32,
)
QUESTIONS = [Question(name, "toy", f"{name}?", ("1",)) for name in ("apples", "baskets", "cows")]


def setting(tokenizer):
    tools = {"python": lambda texts: [Observation("ok", "7") for _ in texts]}
    return setting_of(tokenizer, DIALOGUE, BUDGET, tools, "0/0", "entropy")


def trees(held, tokenizer):
    return grow(QUESTIONS, held, setting(tokenizer))


def as_rows(grown):
    """All that is in trees."""
    return [
        (n.parent, n.kind, n.outcome, n.text, n.tokens.tolist(), n.logprobs.tolist())
        for tree in grown
        for n in tree.nodes
    ] + [tree.leaves for tree in grown]


def test_trees_have_budgets_and_policys_logprobs(engine, make, tokenizer):
    model, made = make(seed=3)
    grown = trees(engine(model, made, tokenizer), tokenizer)
    assert [len(tree.leaves) for tree in grown] == [BUDGET.leaves] * 3
    for tree in grown:
        for leaf in tree.leaves:
            path = [tree.nodes[index] for index in tree.path(leaf)]
            tokens = torch.from_numpy(np.concatenate([node.tokens for node in path])).long()
            with torch.no_grad():
                logprobs = model(tokens[None]).logits[0].log_softmax(-1)[:-1]
            own = logprobs.gather(-1, tokens[1:, None])[:, 0].numpy()
            first = 0
            for node in path:
                if node.kind == TURN:
                    expected = own[first - 1 : first - 1 + len(node.tokens)]
                    np.testing.assert_allclose(node.logprobs, expected, atol=CLOSE)
                first += len(node.tokens)


# ---------------------------------------------------------------- what dies


def test_killed_engine_restarts_and_samples_again(engine, make, tokenizer, monkeypatch, capfd):
    """In a turn, and between the first turns of trees and the branches from them."""
    model, made = make(seed=3)
    held = engine(model, made, tokenizer)
    held.close()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", PYTHON)  # a signal for what forks is not the fork's
        _, whole = sampled(held, model.config.vocab_size)
        victim = held.connection.process
        os.kill(victim.pid, signal.SIGSTOP)  # it is in the middle of it, for as long as we like
        threading.Timer(0.5, lambda: os.kill(victim.pid, signal.SIGKILL)).start()
        _, again = sampled(held, model.config.vocab_size)
    assert same(again, whole)
    assert held.connection.process is not victim
    assert capfd.readouterr().out.count("restarting") == 1

    whole = as_rows(trees(held, tokenizer))
    victim = held.connection.process
    killed = []
    interrupted = setting(tokenizer)
    read = interrupted.dialect.read

    def killing(*turn):
        if not killed:
            killed.append(os.kill(victim.pid, signal.SIGKILL))
        return read(*turn)

    interrupted.dialect.read = killing
    again = grow(QUESTIONS, held, interrupted)
    assert killed and held.connection.process is not victim
    assert as_rows(again) == whole
    assert "restarting" in capfd.readouterr().out


def test_weights_that_do_not_load_restart_the_engine(engine, make, tokenizer, tmp_path, capfd):
    model, made = make()
    held = engine(model, made, tokenizer)
    sampled(held, model.config.vocab_size)
    changed(model)
    other = save(model, tokenizer, tmp_path / "updated")
    wider, _ = make(hidden=128, heads=4)
    held.set_policy(model, tokenizer, lambda: tmp_path / "updated", other.digest)
    in_place = held.connection.load
    # Weights of another shape do not load.
    held.connection.load = lambda _, folder: in_place(wider, folder)
    check(model, *sampled(held, model.config.vocab_size))
    assert "restarting" in capfd.readouterr().out


def test_lanes_grow_the_trees_of_rounds(engine, make, tokenizer):
    model, made = make(seed=3)
    rounds = as_rows(trees(engine(model, made, tokenizer), tokenizer))
    alone = SETTINGS.model_copy(update={"lanes": 3})
    held = engine(model, made, tokenizer, alone)
    assert len(held.replicas(3)) == 3
    assert as_rows(trees(held, tokenizer)) == rounds


def test_vllm_that_cannot_start_is_an_error(engine, make, tokenizer):
    model, made = make()
    too_little = SETTINGS.model_copy(update={"memory": 1e-6})
    held = engine(model, made, tokenizer, too_little)
    with pytest.raises(RuntimeError, match=r"(?i)cache|memory"):
        sampled(held, model.config.vocab_size)


TRAINER = """
import sys, time
from pathlib import Path
from tasks.engines.vllm.connection import LocalVllm
here = LocalVllm(Path(sys.argv[1]), {"max_model_len": 64, "skip_tokenizer_init": True,
                 "kv_cache_memory_bytes": 2**28, "enforce_eager": True, "dtype": "float32"})
print(here.process.pid, flush=True)
time.sleep(600)
"""


def test_the_process_ends_with_its_trainer(make):
    _, made = make()
    trainer = subprocess.Popen(
        [PYTHON, "-c", TRAINER, made.path],
        cwd=connection.ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = int(trainer.stdout.readline())
    assert psutil.pid_exists(pid)
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 300
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(pid)

"""Rows of an embedding without a token: never drawn, never in a probability, never learned.

Their logits are made the largest by far, so that one of them in a softmax changes every number.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tasks.engines import SamplingRequest
from tasks.engines.transformers import decoder as decoders
from tasks.engines.transformers import transformers_engine
from tasks.engines.transformers.sampling_worker import WorkerPool
from tasks.engines.transformers.transformers_engine import TransformersEngine, WorkerEngine
from tasks.learning.passes import node_logprobs, token_logprobs
from tasks.policy import resident, token_ids
from tasks.policy.lean_transformers import transformers
from tasks.policy.load_model import load_policy
from tasks.policy.logits import head_of
from tasks.policy.tiny import build_tokenizer, tiny_config
from tasks.policy.token_ids import TokenIds
from tests.conftest import TEXTS
from tests.learners import GRPO, SETTINGS, TEMPERATURE, fresh, run
from tests.sections import MACHINE
from tests.trees import credited, random_tree

ROWS, LOUD = 320, 50.0  # of the embedding; how much larger their logits are
KINDS = ("padded", "with a hole")


def with_a_hole(tiny):
    """A tokenizer without one of its merges, which no other one needs: no token has its id.

    It has no tags: they would be numbered anew.
    """
    tokenizer = build_tokenizer(TEXTS, tiny, tags=())
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    merges = content["model"]["merges"]
    needed = {part for pair in merges for part in pair}
    spare = next(pair for pair in merges if "".join(pair) not in needed)
    merges.remove(spare)
    del content["model"]["vocab"]["".join(spare)]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        chat_template=tokenizer.chat_template,
    )


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tiny, tmp_path_factory):
    """The folder of a policy with more rows than tokens."""
    hole = request.param == "with a hole"
    tokenizer = with_a_hole(tiny) if hole else build_tokenizer(TEXTS, tiny)
    known = sorted(tokenizer.get_vocab().values())
    unknown = sorted(set(range(ROWS)) - set(known))
    assert (unknown[0] < known[-1]) == hole
    config = tiny_config(tiny, ROWS, tokenizer.eos_token_id)
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():  # of two opposite rows one has a large logit after any context
        head = model.get_output_embeddings().weight
        for place, row in enumerate(unknown):
            head[row] = LOUD * (-1) ** place * head[known[5 + place // 2]]
    made = tmp_path_factory.mktemp("padded")
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture
def learning(folder):
    return fresh(folder)


def known_of(learning):
    """The ids that the tokenizer has, as it says itself."""
    return torch.tensor(sorted(learning.tokenizer.get_vocab().values()))


@torch.no_grad()
def plain(learning, tokens, temperature):
    """log-probabilities [T - 1] of tokens after the first, and entropies, over known ids alone."""
    known = known_of(learning)
    logits = learning.model.eval()(torch.from_numpy(tokens).long()[None]).logits[0].double()
    every = torch.full_like(logits, -torch.inf)
    every[:, known] = torch.log_softmax(logits[:, known] / temperature, -1)
    seen = every[:, known]
    entropies = -(seen.exp() * seen).sum(-1) / np.log(len(known))
    after = torch.from_numpy(tokens[1:]).long()
    return every[:-1].gather(-1, after[:, None])[:, 0].numpy(), entropies[:-1].numpy()


def test_ids_with_a_token_are_found_and_told():
    ids = token_ids.among([0, 1, 3, 9], rows=6)
    assert ids == TokenIds(4, (2,)) and ids.count == 3
    assert [number for number in range(-1, 6) if number in ids] == [0, 1, 3]
    assert token_ids.parse(ids.told()) == ids
    assert token_ids.among(range(6), rows=6) == TokenIds(6)


def test_policy_of_a_folder_knows_its_ids(learning, initial):
    known = known_of(learning).tolist()
    ids = token_ids.of(learning.model)
    assert [number for number in range(ROWS) if number in ids] == known
    assert ids.end < ROWS and len(known) == ids.count
    assert token_ids.of(resident.to_sample(learning.model, MACHINE)) == ids
    whole = load_policy(initial, MACHINE)
    assert token_ids.of(whole) == TokenIds(whole.config.vocab_size)
    logits = torch.randn(3, whole.config.vocab_size)
    assert token_ids.of(whole).only(logits) is logits  # nothing is computed where all have a token


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool()
    yield pool
    pool.close()


def engine_of(way, learning, pool, monkeypatch):
    engine = TransformersEngine(learning.model, learning.tokenizer)
    if way == "library":
        for module in (decoders, transformers_engine):
            monkeypatch.setattr(module, "decodes", lambda *_: False)
    return WorkerEngine(engine, pool) if way == "worker" else engine


@pytest.mark.parametrize("way", ["decoder", "library", "worker"])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (20.0, 0.9)])
def test_sampler_draws_tokens_alone(learning, pool, monkeypatch, way, temperature, top_p):
    engine = engine_of(way, learning, pool, monkeypatch)
    prompts = [np.arange(3, 9 + i, dtype=np.int32) for i in range(6)]
    with engine.session(6, 120, temperature, top_p, ()) as session:
        samples = session.sample(
            [SamplingRequest(session.open(), tokens, i, 40) for i, tokens in enumerate(prompts)]
        )
    drawn = np.concatenate([sample.tokens for sample in samples])
    assert len(set(drawn.tolist())) > 20 and np.isin(drawn, known_of(learning)).all()
    for prompt, sample in zip(prompts, samples, strict=True):
        tokens = np.concatenate([prompt, sample.tokens])
        logprobs, entropies = plain(learning, tokens, temperature)
        np.testing.assert_allclose(sample.logprobs, logprobs[len(prompt) - 1 :], atol=1e-5)
        np.testing.assert_allclose(sample.entropies, entropies[len(prompt) - 1 :], atol=1e-5)


def test_many_prompts_fed_in_parts_draw_tokens_alone(learning, monkeypatch):
    monkeypatch.setattr("tasks.engines.transformers.cache.FEED_TOKENS", 16)
    engine = TransformersEngine(learning.model, learning.tokenizer)
    with engine.session(6, 60, 1.0, 1.0, ()) as session:
        requests = [
            SamplingRequest(session.open(), np.arange(3, 9 + i, dtype=np.int32), i, 8)
            for i in range(6)
        ]
        samples = session.sample(requests)
    for request, sample in zip(requests, samples, strict=True):
        expected, _ = plain(learning, np.concatenate([request.tokens, sample.tokens]), 1.0)
        np.testing.assert_allclose(sample.logprobs, expected[len(request.tokens) - 1 :], atol=1e-5)


def trees_of(learning, count=3):
    known = known_of(learning).numpy()
    trees = [credited(random_tree(seed, 4, vocabulary=len(known)), seed) for seed in range(count)]
    for tree in trees:
        for node in tree.tree.nodes:
            node.tokens[:] = known[node.tokens]
    return trees


def test_learner_and_reference_leave_them_out(learning, folder):
    trees = trees_of(learning)
    reference = resident.POLICIES.load_reference(folder, MACHINE)
    ours, theirs = (
        node_logprobs(model, trees, TEMPERATURE, SETTINGS, MACHINE)
        for model in (learning.model, reference)
    )
    for number, tree in enumerate(trees):
        for leaf in tree.tree.leaves:
            path = tree.tree.path(leaf)
            tokens = np.concatenate([tree.tree.nodes[node].tokens for node in path])
            expected, _ = plain(learning, tokens, TEMPERATURE)
            ends = np.cumsum([len(tree.tree.nodes[node].tokens) for node in path])
            for node, end in zip(path, ends, strict=True):
                if count := len(ours[number][node]):
                    part = expected[end - 1 - count : end - 1]
                    np.testing.assert_allclose(ours[number][node], part, atol=1e-5)
                    np.testing.assert_allclose(theirs[number][node], part, atol=1e-5)


def test_entropies_are_over_tokens_alone(learning):
    tokens = np.arange(3, 40, dtype=np.int32)
    states = learning.model.eval().base_model(torch.from_numpy(tokens).long()[None])
    states = states.last_hidden_state[0, :-1].detach().requires_grad_()
    targets = torch.from_numpy(tokens[1:]).long()
    logprobs, entropies = token_logprobs(learning.model, states, targets, 0.5, entropy=True)
    expected = plain(learning, tokens, 0.5)
    np.testing.assert_allclose(logprobs.detach(), expected[0], atol=1e-5)
    np.testing.assert_allclose(entropies.detach(), expected[1], atol=1e-5)
    (logprobs.sum() + entropies.sum()).backward()
    assert torch.isfinite(states.grad).all()
    assert head_of(learning.model)(states).shape[-1] == token_ids.of(learning.model).end


def test_their_rows_get_no_gradient(folder):
    """With an entropy bonus, too, and they stay as they were."""
    settings = SETTINGS.model_copy(update={"weight_decay": 0.0})
    learning = fresh(folder, settings)
    head = learning.model.get_output_embeddings().weight
    unknown = sorted(set(range(ROWS)) - set(known_of(learning).tolist()))
    before = head.detach().clone()
    loss = replace(GRPO, entropy_bonus=0.1)
    run(learning, trees_of(learning), settings, loss)
    assert torch.equal(head[unknown], before[unknown])
    assert not torch.equal(head, before)

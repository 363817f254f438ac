import copy

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tasks.engines import SamplingRequest
from tasks.engines.transformers import decoder as decoders
from tasks.engines.transformers.cache import RaggedCache, RaggedSession, SpareMemory
from tasks.engines.transformers.decoder import decoder, decodes, is_small, last_states, pairs
from tasks.engines.transformers.shared_attention import attend
from tasks.engines.transformers.transformers_engine import GROUPED, TransformersEngine, library
from tests.trees import small_policy

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ROWS, CONTEXT = 5, 40


def llama(**more):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **more)).eval()


def fed(model, start, count):
    """A cache with something in it, and tokens that go behind."""
    random = torch.Generator().manual_seed(start)
    cache = RaggedCache(library(model), ROWS, CONTEXT, SpareMemory())
    cache.store.copy_(torch.randn(cache.store.shape, generator=random))
    cache.rows = slice(0, ROWS)
    first = torch.randint(1, start, (ROWS, 1), generator=random)
    cache.positions = first + torch.arange(count)
    cache.visible = int(cache.positions.max()) + 1
    return cache, torch.randint(0, 97, (ROWS, count), generator=random)


def in_pairs(store):
    """The library's keys and values, as our pass keeps them."""
    keys, values = store.unbind(1)
    return torch.stack([keys[..., pairs(keys.shape[-1])], values], 1)


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("model", [small_policy().eval(), llama()])
def test_it_gives_what_the_librarys_own_pass_gives(model, count):
    (ours, tokens), (theirs, _) = fed(model, 20, count), fed(model, 20, count)
    ours.store.copy_(in_pairs(theirs.store))
    model.set_attn_implementation(GROUPED)
    with torch.inference_mode():
        last = torch.arange(ROWS) % count
        found = last_states(decoder(model, CONTEXT), tokens, last, ours)
        expected = library(model).last_states(tokens, last, theirs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    ends = ours.positions[:, 0] + last + 1  # what comes after is padding
    for row, end in enumerate(ends):
        held, wanted = (store[:, :, row, :, :end] for store in (ours.store, in_pairs(theirs.store)))
        torch.testing.assert_close(held, wanted, rtol=0, atol=1e-5)


def test_it_has_the_weights_of_now():
    model = small_policy().eval()
    cache, tokens = fed(model, 20, 1)
    only = torch.zeros(ROWS, dtype=torch.long)
    with torch.inference_mode():
        before = last_states(decoder(model, CONTEXT), tokens, only, cache)
    with torch.no_grad():
        model.base_model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    with torch.inference_mode():
        after = last_states(decoder(model, CONTEXT), tokens, only, cache)
    assert not torch.equal(before, after)


def test_other_models_are_left_to_the_library(monkeypatch):
    assert not decodes(MistralForCausalLM(MistralConfig(**SHAPE)))
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
    assert not decodes(llama(rope_parameters=scaled))
    assert not decodes(llama(hidden_act="gelu"))
    assert not decodes(llama(attention_bias=True))  # there the output has one too
    sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    assert not decodes(Qwen2ForCausalLM(Qwen2Config(**SHAPE, **sliding)))
    assert decodes(llama())
    assert decodes(llama(), torch.bfloat16)
    assert not decodes(llama(), torch.float16)
    monkeypatch.setattr(decoders, "SMALL", 1000)
    assert decodes(llama()), "with packed weights"
    monkeypatch.setattr(decoders, "MOST_COPIED", 1000)
    assert not decodes(llama()), "a copy would be too large"
    assert decodes(llama(), torch.bfloat16), "another pass has a copy, too"


# ---- a real vocabulary

VOCABULARY = 49_152


@pytest.fixture(scope="module")
def large():
    """A llama with the heads and the vocabulary of a small real one, and logits that matter."""
    torch.manual_seed(0)
    shape = {**SHAPE, "vocab_size": VOCABULARY, "hidden_size": 192, "intermediate_size": 512}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64}
    config = LlamaConfig(**{**shape, **heads, "max_position_embeddings": 512})
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.mul_(3)
        model.lm_head.weight.mul_(2)
    return model


class Tokenizer:
    eos_token_id = -1

    def batch_decode(self, tokens):
        return ["x"] * len(tokens)


def dialogues(count, beginning):
    """Contexts that begin alike, of different lengths."""
    random = np.random.default_rng(0)
    alike = random.integers(3, VOCABULARY, beginning)
    ends = [random.integers(3, VOCABULARY, 5 + 3 * row) for row in range(count)]
    return [np.concatenate([alike, end]).astype(np.int32) for end in ends]


def played(engine, beginning=90, top_p=1.0):
    """(context, sample) of two turns of several paths of each context, a result in between."""
    contexts = [context for context in dialogues(4, beginning) for _ in range(3)]
    turns = []
    with engine.session(len(contexts), 200, 1.0, top_p, []) as session:
        handles = [session.open() for _ in contexts]
        for turn in range(2):
            requests = [
                SamplingRequest(handle, context, 100 * turn + i, 6 + i)
                for i, (handle, context) in enumerate(zip(handles, contexts, strict=True))
            ]
            samples = session.sample(requests)
            turns += zip(contexts, samples, strict=True)
            contexts = [
                np.concatenate([context, sample.tokens, context[-4 - i :]])
                for i, (context, sample) in enumerate(zip(contexts, samples, strict=True))
            ]
    return turns


def apart(model, turns, autocast=False):
    """How far log-probabilities of sampled tokens are from a plain pass: mean and largest."""
    found = [sample.logprobs - plain(model, context, sample, autocast) for context, sample in turns]
    absolute = np.abs(np.concatenate(found))
    return float(absolute.mean()), float(absolute.max())


def plain(model, context, sample, autocast):
    whole = torch.from_numpy(np.concatenate([context, sample.tokens]).astype(np.int64))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(whole[None]).logits[0, len(context) - 1 : -1].float()
    return logits.log_softmax(-1).numpy()[np.arange(len(sample.tokens)), sample.tokens]


@pytest.mark.parametrize("beginning", [0, 90])
@pytest.mark.parametrize("top_p", [1.0, 0.95])
def test_logprobs_of_packed_weights_are_those_of_a_plain_pass(large, beginning, top_p):
    assert not is_small(large) and decodes(large)
    _, largest = apart(large, played(TransformersEngine(large, Tokenizer()), beginning, top_p))
    assert largest < 1e-5


def test_bfloat16_is_as_near_to_the_learners_pass_as_a_cast_model(large, monkeypatch):
    ours = played(TransformersEngine(large, Tokenizer(), torch.bfloat16))
    mean, largest = apart(large, ours, autocast=True)
    assert mean < 0.02 and largest < 0.15
    monkeypatch.setattr(decoders, "KINDS", (torch.float32,))
    cast = copy.deepcopy(large).to(torch.bfloat16)
    assert not decodes(cast)
    assert mean < 1.1 * apart(large, played(TransformersEngine(cast, Tokenizer())), True)[0]


def test_the_beginning_that_prompts_share_is_fed_once(large, monkeypatch):
    fed = []
    feed = RaggedSession._feed

    def watched(session, rows, tokens, known):
        fed.append(sum(map(len, tokens)) - sum(known))
        return feed(session, rows, tokens, known)

    monkeypatch.setattr(RaggedSession, "_feed", watched)
    played(TransformersEngine(large, Tokenizer()), 120)
    assert fed[:2] == [120, sum(5 + 3 * row for row in range(4))]


def test_sessions_share_packed_weights_until_these_change(large):
    model = copy.deepcopy(large)
    engine = TransformersEngine(model, Tokenizer())

    def drawn():
        with engine.session(1, 50, 1.0, 1.0, []) as session:
            (sample,) = session.sample([SamplingRequest(session.open(), dialogues(1, 9)[0], 1, 9)])
        return sample.logprobs, engine.packed

    (first, weights), (again, kept) = drawn(), drawn()
    assert kept is weights and first.tolist() == again.tolist()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    changed, made = drawn()
    assert made is not weights and changed.tolist() != first.tolist()


def test_a_policy_with_packed_weights_is_sampled_in_threads(large):
    engine, before = TransformersEngine(large, Tokenizer()), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert engine.replicas(4) == [engine, engine]
    finally:
        torch.set_num_threads(before)


def test_attention_over_shared_keys_is_attention():
    random = torch.Generator().manual_seed(0)
    query = torch.randn(6, 2, 3, 8, generator=random)
    key, value = torch.randn(2, 6, 2, 20, 8, generator=random)
    for part in (key, value):
        part[:, :, :12] = part[:1, :, :12]
    hides = torch.arange(20) > torch.randint(12, 20, (6, 1, 1, 1), generator=random)
    mask = torch.zeros(hides.shape).masked_fill(hides, -torch.inf)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1.0)
    for part in (key, value):
        part[1:, :, :12] = torch.nan  # not read
    found = attend(query, key, value, mask[..., 12:], 12)
    torch.testing.assert_close(found, expected)

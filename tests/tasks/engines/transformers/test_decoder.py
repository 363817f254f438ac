import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tasks.engines.transformers import decoder as decoders
from tasks.engines.transformers.cache import RaggedCache, SpareMemory
from tasks.engines.transformers.decoder import decoder, decodes, last_states, pairs
from tasks.engines.transformers.transformers_engine import GROUPED, library
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
    keys, values = store.chunk(2, 2)
    return torch.cat([keys[..., pairs(keys.shape[-1])], values], 2)


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
    torch.testing.assert_close(ours.store, in_pairs(theirs.store), rtol=0, atol=1e-5)


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
    monkeypatch.setattr(decoders, "LARGEST", 1000)
    assert not decodes(llama())

"""Which families take the ragged session: each is tried, with as small a model as it has."""

import logging
import logging.handlers

import numpy as np
import pytest
import torch

from tasks.engines.contract import SamplingRequest
from tasks.engines.transformers import ways
from tasks.engines.transformers.cache import RaggedSession
from tasks.engines.transformers.own_cache import OwnCacheSession
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.policy.lean_transformers import transformers
from tests.trees import small_policy

CONFIGS = transformers.models.auto.configuration_auto.CONFIG_MAPPING
VOCABULARY, WINDOW = 96, 12
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "head_dim": 12},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 256, "initializer_range": 0.25},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {
    **{"num_local_experts": 4, "n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"moe_topk": 2, "moe_num_experts": 4},
}
ALL_HEADS = {"num_key_value_heads": 4}  # of families without grouped ones
WINDOWS = {
    **{"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    **{"layer_types": ["sliding_attention", "full_attention"]},
}
EVERY = {"sliding_window": WINDOW}
FAMILIES = {
    "cohere": {"logit_scale": 0.5},
    "cohere2": {**WINDOWS, "logit_scale": 0.5},
    "cohere2_moe": {**WINDOWS, **EXPERTS, "logit_scale": 0.5},
    **dict.fromkeys(("cwm", "exaone4", "gemma3_text", "olmo3", "qwen2"), WINDOWS),
    **dict.fromkeys(("qwen3", "smollm3"), WINDOWS),
    **dict.fromkeys(("exaone_moe", "laguna", "qwen3_moe"), WINDOWS | EXPERTS),
    **dict.fromkeys(("ministral", "ministral3", "mistral", "phi3", "starcoder2"), EVERY),
    "gemma2": {**WINDOWS, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "vaultgemma": {**WINDOWS, "attn_logit_softcapping": 2.0},
    "mixtral": EXPERTS | EVERY,
    "gpt2": ALL_HEADS,
    "gpt_oss": WINDOWS | EXPERTS,  # sinks
    "opt": {**ALL_HEADS, "word_embed_proj_dim": 48, "ffn_dim": 64, "init_std": 0.25},
}
NO_SDPA = ("gemma2", "gpt_oss", "vaultgemma")  # it would leave out their bounds and sinks


class Tokenizer:
    """As much of one as the engine asks for."""

    eos_token_id = 2


def engine_of(kind, monkeypatch, **changes):
    torch.manual_seed(0)
    config = CONFIGS[kind](**{**SIZES, **FAMILIES.get(kind, EXPERTS), **changes})
    attention = "eager" if kind in NO_SDPA else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    engine = TransformersEngine(model.eval(), Tokenizer())
    monkeypatch.setattr(engine, "pieces", lambda: [chr(40 + i) for i in range(VOCABULARY)])
    return engine


@pytest.mark.parametrize("kind", sorted(ways.RAGGED))
def test_the_ragged_session_reports_the_log_probabilities_of_a_plain_pass(kind, monkeypatch):
    engine = engine_of(kind, monkeypatch)
    random = np.random.default_rng(0)
    contexts = [random.integers(3, VOCABULARY, n).astype(np.int32) for n in (3 * WINDOW, 5)]
    turns = []
    with engine.session(2, 90, 1.0, 1.0, []) as session:
        assert isinstance(session, RaggedSession)
        handles = [session.open(), session.open()]
        for turn in range(2):
            requests = [
                SamplingRequest(handle, tokens, 2 * turn + i, 12 + i)
                for i, (handle, tokens) in enumerate(zip(handles, contexts, strict=True))
            ]
            samples = session.sample(requests)
            turns += zip(requests, samples, strict=True)
            contexts = [
                np.concatenate([tokens, one.tokens, tokens[:3]])
                for tokens, one in zip(contexts, samples, strict=True)
            ]
    for request, sample in turns:
        row = torch.from_numpy(np.concatenate([request.tokens, sample.tokens])).long()
        with torch.no_grad():
            logits = engine.model(input_ids=row[None], use_cache=False).logits[0].float()
        logprobs = torch.log_softmax(logits[len(request.tokens) - 1 : -1], -1)
        own = logprobs.gather(1, row[len(request.tokens) :, None])[:, 0]
        np.testing.assert_allclose(sample.logprobs, own.numpy(), rtol=0, atol=1e-4)
        assert logits.std() > 0.3


def test_layers_of_a_kind_that_the_ragged_cache_does_not_hold_are_sampled_otherwise(monkeypatch):
    chunked = ["chunked_attention", "full_attention"]
    engine = engine_of("qwen3", monkeypatch, layer_types=chunked)
    assert not ways.is_ragged(engine.model.config)


def test_a_family_and_its_way_are_said_once(monkeypatch):
    """To a logger of the test's own: libraries change what loggers of the process let through."""
    said = logging.handlers.BufferingHandler(100)
    logger = logging.Logger("of this test")
    logger.addHandler(said)
    monkeypatch.setattr(ways, "LOG", logger)
    ways.say.cache_clear()
    engine = engine_of("gpt_neox", monkeypatch)
    for _ in range(2):
        with engine.session(1, 20, 1.0, 1.0, []) as session:
            assert isinstance(session, OwnCacheSession)
    (record,) = said.buffer
    assert record.levelno == logging.WARNING and "gpt_neox" in record.getMessage()


def test_positions_that_change_with_the_context_are_refused_beyond_it(monkeypatch):
    rope = {
        **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 40},
        **{"short_factor": [1.0] * 6, "long_factor": [4.0] * 6},
    }
    changes = {"rope_parameters": rope, "original_max_position_embeddings": 40}
    engine = engine_of("phi3", monkeypatch, **changes)
    with pytest.raises(ValueError, match="change beyond 40"), engine.session(1, 41, 1.0, 1.0, []):
        pass
    with engine.session(1, 40, 1.0, 1.0, []):
        pass


def test_a_policy_without_a_cache_has_one_lane(monkeypatch):
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = engine_of("recurrent_gemma", monkeypatch, block_types=["recurrent", "attention"])
        assert engine.replicas(2) == [engine]
        several = TransformersEngine(small_policy().eval(), Tokenizer())
        assert len(several.replicas(2)) == 2
    finally:
        torch.set_num_threads(torch_threads)

"""Families of all kinds over transformers' own caches: plain passes give the same numbers.

Tiny random models, whose logits spread and whose contexts are longer than windows and chunks.
"""

import copy

import numpy as np
import pytest
import torch

from params.schema.base import Machine
from tasks.engines.contract import SamplingRequest
from tasks.engines.transformers.own_cache import OwnCacheSession, OwnPass
from tasks.engines.transformers.serve import Served
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.policy.lean_transformers import transformers
from tasks.policy.load_model import save_model

CONFIGS = transformers.models.auto.configuration_auto.CONFIG_MAPPING
VOCABULARY, WINDOW = 96, 12
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "head_dim": 12},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 256, "initializer_range": 0.25},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {
    **{"num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
LATENT = {
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12},
    **{"v_head_dim": 10, "head_dim": 8, "num_key_value_heads": 4},
}
INDEXED = {"index_n_heads": 32, "index_head_dim": 16, "index_topk": 8}
MAMBA_2 = {
    **{"mamba_num_heads": 4, "mamba_head_dim": 24, "ssm_state_size": 8, "n_groups": 1},
    **{"chunk_size": 8},
}
FAMILIES = {
    "qwen3_5_text": {  # a gated delta rule
        **{"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4},
        **{"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 12},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "gemma4_text": {  # heads whose sizes differ by layer, layers that share keys and values
        **MIXED,
        **{"global_head_dim": 20, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0},
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
    },
    "deepseek_v3": {**EXPERTS, **LATENT},
    "falcon_h1": {  # a state beside keys and values, in each layer
        **{"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_ssm": 96},
        **{"mamba_chunk_size": 8},
    },
    "llama4_text": {  # chunks
        **EXPERTS,
        **{"attention_chunk_size": WINDOW, "intermediate_size_mlp": 64},
        **{"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
        **{"floor_scale": 16, "attn_scale": 2.0},  # of queries, by how many tokens came before
    },
    "phimoe": {**EXPERTS, "sliding_window": WINDOW},  # a window that its attention is not told
    "deepseek_v32": {**EXPERTS, **LATENT, **INDEXED},  # a choice of keys, which padding disturbs
    "nemotron_h": {  # time steps with a least one
        **MAMBA_2,
        **EXPERTS,
        **{"layers_block_type": ["mamba", "attention"], "time_step_min": 0.3},
    },
    "jamba": {  # one token at a time behind a cache
        **EXPERTS,
        **{"mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    },
    # no attention
    "mamba": {"state_size": 8, "time_step_rank": 4, "intermediate_size": 96},
    # a cache of a class of its own
    "minimax": {**EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    # a cache of a class of its own, which each path has for itself
    "rwkv": {"attention_hidden_size": 48},
    # no cache that can be used
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": WINDOW},
    "xlstm": {"num_heads": 4, "num_blocks": 2, "chunk_size": 16, "hidden_size": 64},
}
FLAT = ("jamba", "rwkv", "xlstm")  # whose logits would spread less
NO_SDPA = ("mamba", "rwkv", "xlstm")


class Tokenizer:
    """As much of one as the engine asks for."""

    eos_token_id = 2


def model_of(kind):
    torch.manual_seed(0)
    attention = "eager" if kind in NO_SDPA else "sdpa"
    config = CONFIGS[kind](**{**SIZES, **FAMILIES[kind]})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and weight.std() < 0.05:
                weight.normal_(0, 0.25)
            elif weight.ndim == 1 and "A_log" not in name and "dt" not in name:
                weight.mul_(1.0 + 0.3 * torch.randn(()))
        if kind in FLAT:
            model.get_output_embeddings().weight.mul_(4)
    return model.eval()


@pytest.fixture(scope="module")
def models():
    """The model of each family, made once."""
    return {}


@pytest.fixture(params=FAMILIES)
def engine(request, models, monkeypatch):
    kind = request.param
    model = models[kind] = models.get(kind) or model_of(kind)
    engine = TransformersEngine(model, Tokenizer())
    monkeypatch.setattr(engine, "pieces", lambda: [chr(40 + i) for i in range(VOCABULARY)])
    return engine


def text(length, seed):
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).astype(np.int32)


def play(engine):
    """Three turns of paths of several lengths, with branches at ends of turns and within them.

    Returns requests and samples.
    """
    turns = []

    def sample(session, contexts, limit):
        requests = [
            SamplingRequest(handle, tokens, len(turns) + i, limit - i % 3)
            for i, (handle, tokens) in enumerate(contexts.items())
        ]
        samples = session.sample(requests)
        turns.extend(zip(requests, samples, strict=True))
        pairs = zip(contexts.items(), samples, strict=True)
        return {handle: np.concatenate([old, one.tokens]) for (handle, old), one in pairs}

    with engine.session(8, 140, 0.9, 0.95, ["z"]) as session:
        assert isinstance(session, OwnCacheSession)
        long, short = text(3 * WINDOW + 1, 0), text(7, 1)
        first, other = session.open(), session.open()
        twin = session.fork(first)
        ends = sample(session, {first: long, twin: long, other: short}, 16)
        grown = {handle: np.concatenate([ends[handle], text(handle, 9)]) for handle in ends}
        grown[session.fork(first)] = grown[first]  # goes on from the end of a turn
        grown[session.fork(twin)] = ends[twin]
        grown[session.fork(first)] = ends[first][: len(long) + 6]  # from a token within a turn
        grown[session.fork(other)] = short
        ends = sample(session, grown, 14)
        session.close(first)
        del ends[first]
        grown = {handle: tokens[:-2] for handle, tokens in ends.items()}
        sample(session, grown, 6)
    return turns


def test_it_gives_the_log_probabilities_and_entropies_of_a_plain_pass(engine):
    spread = 0.0
    for request, sample in play(engine):
        row = torch.from_numpy(np.concatenate([request.tokens, sample.tokens])).long()
        with torch.no_grad():
            logits = engine.model(input_ids=row[None], use_cache=False).logits[0].float()
        logprobs = torch.log_softmax(logits[len(request.tokens) - 1 : -1] / 0.9, -1)
        own = logprobs.gather(1, row[len(request.tokens) :, None])[:, 0]
        entropies = -(logprobs.exp() * logprobs).sum(-1) / np.log(VOCABULARY)
        np.testing.assert_allclose(sample.logprobs, own.numpy(), rtol=0, atol=1e-4)
        np.testing.assert_allclose(sample.entropies, entropies.numpy(), rtol=0, atol=1e-4)
        spread = max(spread, float(logits.std()))
    assert spread > 1


def test_a_turn_does_not_depend_on_its_neighbours(engine):
    for request, sample in play(engine):
        with engine.session(1, 140, 0.9, 0.95, ["z"]) as session:
            alone = SamplingRequest(
                session.open(), request.tokens, request.seed, request.max_tokens
            )
            [same] = session.sample([alone])
        assert same.tokens.tolist() == sample.tokens.tolist()
        assert same.stopped == sample.stopped
        np.testing.assert_allclose(same.logprobs, sample.logprobs, rtol=0, atol=1e-4)


def test_a_beginning_that_prompts_share_is_computed_once(engine, monkeypatch):
    """Equal numbers, and fewer tokens in those families that go on from a cache at once."""
    counted = []
    compute = OwnPass.compute

    def watched(self, tokens, *others):
        counted.append(tokens.size)
        return compute(self, tokens, *others)

    monkeypatch.setattr(OwnPass, "compute", watched)
    contexts = [np.concatenate([text(100, 0), text(4 + row, 1 + row)]) for row in range(6)]
    with engine.session(6, 140, 1.0, 1.0, []) as session:
        requests = [
            SamplingRequest(session.open(), tokens, 50 + i, 2) for i, tokens in enumerate(contexts)
        ]
        able = session.own_pass.cached and session.own_pass.several
        counted.clear()
        samples = session.sample(requests)
    new = sum(map(len, contexts))
    if able:
        assert sum(counted) < new - 4 * 100
    for request, sample in zip(requests, samples, strict=True):
        row = torch.from_numpy(np.concatenate([request.tokens, sample.tokens])).long()
        with torch.no_grad():
            logits = engine.model(input_ids=row[None], use_cache=False).logits[0].float()
        logprobs = torch.log_softmax(logits[len(request.tokens) - 1 : -1], -1)
        own = logprobs.gather(1, row[len(request.tokens) :, None])[:, 0]
        np.testing.assert_allclose(sample.logprobs, own.numpy(), rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def convolved(tokenizer):
    """A policy with a state, whose tokens are those of a tokenizer."""
    torch.manual_seed(0)
    changes = {**SIZES, **FAMILIES["lfm2"], "vocab_size": len(tokenizer)}
    config = CONFIGS["lfm2"](**changes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def sampled(engine, tokens):
    with engine.session(1, 60, 0.9, 1.0, []) as session:
        return session.sample([SamplingRequest(session.open(), tokens, 7, 12)])[0]


def test_no_state_outlives_a_change_of_weights(convolved, tokenizer):
    model = copy.deepcopy(convolved)
    engine, tokens = TransformersEngine(model, tokenizer), text(20, 0)
    before = sampled(engine, tokens)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    after = sampled(engine, tokens)
    fresh = sampled(TransformersEngine(copy.deepcopy(model), tokenizer), tokens)
    assert after.tokens.tolist() == fresh.tokens.tolist()
    assert after.logprobs.tolist() == fresh.logprobs.tolist() != before.logprobs.tolist()


def test_a_server_gives_what_the_engine_gives(convolved, tokenizer, tmp_path):
    model = copy.deepcopy(convolved)
    save_model(model, tmp_path / "first")
    tokenizer.save_pretrained(tmp_path / "first")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    save_model(model, tmp_path / "second")
    tokenizer.save_pretrained(tmp_path / "second")
    machine = Machine(threads=1, device="cpu", precision="float32")
    served, tokens = Served(machine, tmp_path / "first"), text(20, 0)
    turn = {"token_ids": tokens.tolist(), "max_tokens": 12, "seed": 7}
    body = {"turns": [turn], "temperature": 0.9, "top_p": 1.0, "stop": []}
    for policy, name in ((convolved, "first"), (model, "second")):
        served.load_folder(str(tmp_path / name), name)
        [choice] = served.generate(body)
        here = sampled(TransformersEngine(policy, tokenizer), tokens)
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert choice["token_ids"] == here.tokens.tolist()
        np.testing.assert_allclose(logprobs, here.logprobs, rtol=0, atol=1e-5)


def test_paths_are_counted_and_a_turn_too_long_is_refused(convolved, tokenizer):
    with TransformersEngine(convolved, tokenizer).session(2, 30, 1.0, 1.0, []) as session:
        first = session.open()
        session.fork(first)
        with pytest.raises(RuntimeError, match="all 2 paths"):
            session.open()
        with pytest.raises(ValueError, match="the session has 30"):
            session.sample([SamplingRequest(first, text(20, 0), 0, 11)])
        session.close(first)
        again = session.open()
        [sample] = session.sample([SamplingRequest(again, text(20, 0), 0, 10)])
        assert 1 <= len(sample.tokens) <= 10
        assert session.sample([]) == []

"""Families beyond full attention: vLLM samples one on a CPU, and refuses one in one line."""

import pytest
import torch

from tasks.policy.lean_transformers import transformers
from tests.vllm.conftest import save
from tests.vllm.test_vllm import changed, check, sampled

pytestmark = pytest.mark.usefixtures("forks")
CONFIGS = transformers.models.auto.configuration_auto.CONFIG_MAPPING
SIZES = {
    **{"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"initializer_range": 0.2, "pad_token_id": None, "bos_token_id": None},
}
WINDOW = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
RECURRENT = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}


def policy_of(kind, tokenizer, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, **SIZES}
    config = CONFIGS[kind](**{**sizes, **changes})
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_contexts_beyond_a_window_are_the_policys(engine, tokenizer, tmp_path, kind):
    """Before an update, and after it in place; a context has up to 65 tokens."""
    model = policy_of(kind, tokenizer, **WINDOW)
    processes = set()
    for name in ("first", "second"):
        made = save(model, tokenizer, tmp_path / name)
        held = engine(model, made, tokenizer)
        check(model, *sampled(held, len(tokenizer)))
        processes.add(held.connection.process.pid)
        changed(model)
    assert len(processes) == 1


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_experts_restart_vllm_with_their_new_weights(engine, tokenizer, tmp_path, capfd, kind):
    experts = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
    window = WINDOW if kind == "gpt_oss" else {"moe_intermediate_size": 32}
    model = policy_of(kind, tokenizer, **window, **experts)
    for name in ("first", "second"):
        held = engine(model, save(model, tokenizer, tmp_path / name), tokenizer)
        asked, samples = sampled(held, len(tokenizer))
        check(model, asked, samples, close=1e-4)
        changed(model)
    assert "no new weights of experts while it runs on a CPU" in capfd.readouterr().out


def test_what_vllm_cannot_sample_is_told_in_one_line(engine, tokenizer, tmp_path, capfd):
    model = policy_of("qwen3_next", tokenizer, **RECURRENT)
    made = save(model, tokenizer, tmp_path / "policy")
    with pytest.raises(ValueError, match=r"^vLLM cannot sample .*: set engine.kind to") as told:
        sampled(engine(model, made, tokenizer), len(tokenizer))
    assert "\n" not in str(told.value)
    assert "restarting" not in capfd.readouterr().out

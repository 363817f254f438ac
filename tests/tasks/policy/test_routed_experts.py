"""Small copies of every kind of mixture of experts: a choice is recorded, and replayed."""

import copy

import pytest
import torch

from tasks.policy.lean_transformers import transformers
from tasks.policy.routed_experts import (
    UNKNOWN,
    Recording,
    Replay,
    not_known,
    routers_of,
    shape_of,
    using,
)
from tasks.policy.small_copy import small_copy

GROUPED = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
FAMILIES = {
    **{kind: {} for kind in ("afmoe", "aria_text", "cohere2_moe", "ernie4_5_moe", "exaone_moe")},
    **{kind: {} for kind in ("flex_olmo", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe")},
    **{kind: {} for kind in ("deepseek_v3", "jamba", "jetmoe", "kimi_linear", "llama4_text")},
    **{kind: {} for kind in ("longcat_flash", "minimax", "minimax_m2", "mixtral", "nemotron_h")},
    **{kind: {} for kind in ("olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next")},
    "deepseek_v2": {
        **{**GROUPED, "topk_method": "group_limited_greedy"},
        **{"num_experts_per_tok": 2, "n_routed_experts": 4},
    },
    "gemma4_text": {
        **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
        "moe_intermediate_size": 32,
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
}
TOKENS = torch.arange(3, 23).view(2, 10)


def logits(model, chooser=None):
    with torch.no_grad(), using(model, chooser):
        return model(input_ids=TOKENS, use_cache=False).logits


def recorded(model):
    recording = Recording(shape_of(routers_of(model)))
    return logits(model, recording), recording.taken().short()


@pytest.mark.parametrize("kind", FAMILIES)
def test_choice_is_recorded_and_replayed(kind):
    model = small_copy(transformers.AutoConfig.for_model(kind, **FAMILIES[kind]), 128)
    plain = logits(model)
    seen, own = recorded(model)
    assert torch.equal(seen, plain)  # recording changes nothing
    replay = Replay(own)
    torch.testing.assert_close(logits(model, replay), plain, rtol=0, atol=1e-5)
    assert replay.share == 0 and replay.pairs == own[..., 0].numel()
    other = (own + 1) % min(router.experts for router in routers_of(model))
    forced = logits(model, Replay(other))
    assert (forced - plain).abs().max() > 0.01
    half = other.clone()
    half[:10] = UNKNOWN  # the first row chooses for itself
    mixed = logits(model, Replay(half))
    torch.testing.assert_close(mixed[0], plain[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(mixed[1], forced[1], rtol=0, atol=1e-5)
    measuring = Replay(other, forced=False)
    torch.testing.assert_close(logits(model, measuring), plain, rtol=0, atol=1e-5)
    assert measuring.share > 0


def test_experts_of_other_groups_keep_their_scores():
    """DeepSeek-V2 sets scores outside the chosen groups to 0; a replayed expert has its own."""
    config = transformers.AutoConfig.for_model("deepseek_v2", **FAMILIES["deepseek_v2"])
    copied = routers_of(small_copy(config, 128))[0].module
    router = type(copied)(config)  # a copy has no groups
    assert router.num_group == 2
    torch.manual_seed(0)
    torch.nn.init.normal_(router.weight)
    states = torch.randn(6, config.hidden_size) / config.hidden_size**0.5
    every = torch.softmax(states @ router.weight.T, -1).detach()
    given = torch.tensor([[0, 3]] * 6)[:, None].short()  # one of each group
    with torch.no_grad(), using(router, Replay(given)):
        _, weights, chosen = router(states)
    assert chosen.tolist() == [[0, 3]] * 6
    torch.testing.assert_close(weights, every[:, [0, 3]] * config.routed_scaling_factor)


def test_copies_of_a_model_have_routers_of_their_own():
    model = small_copy(transformers.AutoConfig.for_model("qwen3_moe"), 128)
    _, own = recorded(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for router in routers_of(other):
            router.module.weight.neg_()
    _, negated = recorded(other)
    assert (negated[:, 0] != own[:, 0]).any()
    assert torch.equal(recorded(model)[1], own)


def test_unknown_and_dense_policies_have_no_routers():
    model = small_copy(transformers.AutoConfig.for_model("phimoe"), 128)
    assert not routers_of(model) and "PhimoeTopKRouter" in not_known(model)
    dense = small_copy(transformers.AutoConfig.for_model("qwen3"), 128)
    assert not routers_of(dense) and not not_known(dense) and shape_of([]) is None


def test_choice_of_other_tokens_is_refused():
    model = small_copy(transformers.AutoConfig.for_model("qwen3_moe"), 128)
    _, own = recorded(model)
    with pytest.raises(ValueError, match="no routing replay"):
        logits(model, Replay(own[1:]))

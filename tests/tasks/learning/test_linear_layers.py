"""Linear layers of large policies: the products of torch, by oneDNN."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from params.schema.base import Machine
from tasks.learning import linear_layers, packing, passes, shares
from tasks.policy.machine import LARGE, in_precision

MACHINE = Machine.model_validate(
    {"threads": 2, "device": "cpu", "precision": "float32", "processes": 1}
)


def llama(hidden):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attention_bias=True,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def large():
    return llama(384)


def gradients(model, tokens):
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.detach(), [
        weight.grad.clone() for weight in model.parameters() if weight.requires_grad
    ]


def exchanged(model):
    return [layer for layer in model.modules() if "forward" in layer.__dict__]


def test_loss_and_gradients_are_those_of_torch(large):
    tokens = torch.randint(0, 2048, (3, 40))
    frozen = large.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    try:
        expected, theirs = gradients(large, tokens)
        with linear_layers.by_onednn(large):
            assert len(exchanged(large)) == 2 * 7 + 1, "all layers, and the head"
            loss, ours = gradients(large, tokens)
    finally:
        frozen.requires_grad_(True)
    assert not exchanged(large), "restored"
    assert loss == pytest.approx(float(expected), rel=1e-6)
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_bfloat16_and_small_models_keep_their_products(large):
    states, layer = torch.randn(2, 4, 384), large.model.layers[0].self_attn.q_proj
    bfloat16 = MACHINE.model_copy(update={"precision": "bfloat16"})
    with linear_layers.by_onednn(large), in_precision(bfloat16):
        found = layer(states)
    with in_precision(bfloat16):
        assert torch.equal(found, layer(states)) and found.dtype is torch.bfloat16
    small = llama(64)
    with linear_layers.by_onednn(small):
        assert not exchanged(small)


def test_layers_are_restored_after_an_error(large):
    with pytest.raises(ZeroDivisionError), linear_layers.by_onednn(large):
        raise ZeroDivisionError
    assert not exchanged(large)


@pytest.mark.parametrize(("weights", "count"), [(LARGE, 2), (LARGE + 1, 1)])
def test_a_large_policy_has_one_lane(monkeypatch, weights, count):
    monkeypatch.setattr(shares, "divided", lambda pairs, number, cost: [pairs] * number)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        cost = packing.Cost(weights, 1, lambda layout: 0)
        lanes = passes.forests_of_lanes([(None, [0]), (None, [0])], 8, cost, MACHINE)
    finally:
        torch.set_num_threads(before)
    assert len(lanes) == count

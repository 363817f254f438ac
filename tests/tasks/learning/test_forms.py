"""Adapters, bf16, critics and reward models with each kind of layer, over trees: as over rows."""

import copy
import threading

import numpy as np
import pytest
import torch
from torch.nn import Linear

from benchmarks import families
from params.schema.reinforce import Lora
from tasks.learning import agreement, outcome
from tasks.learning.attention import GATHERED, attending
from tasks.learning.packing import uncredited
from tasks.learning.passes import node_values
from tasks.ledger.artifacts import Artifact
from tasks.policy import adapter, layer_kinds
from tasks.policy.logits import backbone_of
from tasks.policy.outcome_model import OutcomeModel
from tasks.policy.resident import Learner, ValueModel
from tasks.policy.small_copy import small_copy
from tests.sections import HALF, MACHINE
from tests.sections import UPDATE as SETTINGS
from tests.trees import random_tree

# a family with each kind of layers -> linear layers of what mixes its tokens
LAYERS = {
    "qwen3_5_text": ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"),
    "lfm2": ("in_proj", "out_proj"),
    "nemotron_h": ("in_proj", "q_proj"),
    "minimax": ("qkv_proj", "output_gate", "out_proj"),
    "kimi_linear": ("q_proj", "b_proj", "f_b_proj", "g_b_proj", "kv_b_proj"),
    "jamba": ("in_proj", "x_proj", "out_proj"),
    "gpt_oss": ("q_proj", "o_proj"),
    "deepseek_v3": ("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    "qwen3_moe": ("q_proj", "o_proj"),
}


@pytest.fixture(scope="module", params=LAYERS)
def model(request):
    made = small_copy(families.config_of(request.param), 2**20)
    form = layer_kinds.learner_form(layer_kinds.described(made.config))
    assert form.kind == layer_kinds.TREES
    return made


@pytest.fixture(scope="module")
def tree():
    return random_tree(3, leaves=4, vocabulary=96, fresh=0.5)


def test_adapters_have_the_gradient_of_rows(model, tree):
    adapted = copy.deepcopy(model)
    modules = LAYERS[model.config.model_type]
    adapter.attach(adapted, Lora(rank=2, alpha=4.0, modules=modules), Artifact("base", ""), 0)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(0.0, 0.1)
    own, rows = (
        found(adapted, tree, MACHINE)
        for found in (agreement.gradient_by_learner, agreement.gradient_by_rows)
    )
    assert {name.split(".")[-4] for name, each in own.items() if each.any()} == {*modules}
    assert agreement.apart(own, rows) < 1e-5


def test_passes_in_bf16_round_as_those_of_rows(model, tree):
    exact = agreement.gradient_by_rows(model, tree, MACHINE)
    rows = agreement.apart(agreement.gradient_by_rows(model, tree, HALF), exact)
    trees = agreement.apart(agreement.gradient_by_learner(model, tree, HALF), exact)
    assert 0 < trees < 3 * rows
    exact = agreement.by_rows(model, tree, MACHINE)
    rows = agreement.largest(agreement.by_rows(model, tree, HALF), exact)
    assert 0 < agreement.largest(agreement.by_learner(model, tree, HALF), exact) < 3 * rows


def head_of_size(model):
    head = Linear(model.config.hidden_size, 1)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        head.weight.normal_()
    return head


@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
def test_a_critic_values_tokens_as_rows_do(own, model, tree):
    backbone = copy.deepcopy(backbone_of(model)) if own else None
    critic = ValueModel(head_of_size(model), backbone, None, 1.0)
    learning = Learner(None, model, None, critic=critic)
    (values,) = node_values(learning, [uncredited(tree)], SETTINGS, MACHINE)
    for leaf in tree.leaves:
        for chain in tree.contexts(leaf):
            tokens = torch.from_numpy(np.concatenate([tree.nodes[n].tokens for n in chain])).long()
            with torch.no_grad():
                states = backbone_of(model)(tokens[None], use_cache=False).last_hidden_state[0]
                expected, at = critic.head(states)[:, 0].numpy(), 0
            for node in chain:
                count = len(tree.nodes[node].tokens)
                if len(values[node]):
                    np.testing.assert_allclose(
                        values[node], expected[at - 1 : at + count - 1], atol=1e-4
                    )
                at += count


def test_a_reward_model_scores_as_rows_do(model, tree):
    scored = OutcomeModel(backbone_of(model), head_of_size(model))
    leaves = [(0, leaf) for leaf in range(len(tree.leaves))]
    logits = outcome.logits_of(scored, [tree], leaves, 10_000, MACHINE)
    for logit, leaf in zip(logits, tree.leaves, strict=True):
        chain = tree.contexts(leaf)[-1]
        tokens = torch.from_numpy(np.concatenate([tree.nodes[n].tokens for n in chain])).long()
        with torch.no_grad():
            states = scored.backbone(tokens[None], use_cache=False).last_hidden_state
            expected = float(scored.head(states[0, -1])[0])
        assert logit == pytest.approx(expected, abs=1e-4)


def test_a_second_session_of_a_model_is_refused_and_the_first_goes_on(tree):
    """The one to end first would take its layers from the other."""
    model = small_copy(families.config_of("lfm2"), 2**20)
    caught = []

    def second():
        try:
            agreement.by_learner(model, tree, MACHINE)
        except RuntimeError as error:
            caught.append(str(error))

    with attending(model, GATHERED):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        assert any("forward" in vars(module) for module in model.modules())
    assert "computes trees already" in caught[0]
    expected = agreement.by_rows(model, tree, MACHINE)
    assert agreement.largest(agreement.by_learner(model, tree, MACHINE), expected) < 1e-4

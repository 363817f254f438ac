"""Policies in memory: which one is used again, and how it samples."""

import numpy as np
import pytest
import torch

from tasks.engines import SamplingRequest
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.learning import passes
from tasks.learning.packing import uncredited
from tasks.policy import checkpoint, resident
from tasks.trees.tree import PROMPT, TURN, Node, Question, Tree
from tests.learners import SETTINGS, fresh, made_trees, run, same, weights
from tests.sections import HALF, MACHINE


def test_only_one_learner_stays_in_memory(initial, tmp_path):
    first = fresh(initial)
    assert resident.POLICIES.load_learner(initial, MACHINE) is first
    checkpoint.save(first, tmp_path)
    other = resident.POLICIES.load_learner(tmp_path / checkpoint.POLICY, MACHINE)
    assert other is not first
    assert same(weights(other.model), weights(first.model))
    assert resident.POLICIES.load_learner(initial, MACHINE) is not first, "only one stays in memory"


def test_kept_learner_has_its_new_folder(initial, tmp_path):
    learning = fresh(initial)
    resident.POLICIES.keep(learning, tmp_path / "later" / "policy")
    assert resident.POLICIES.load_learner(tmp_path / "later" / "policy", MACHINE) is learning
    assert resident.POLICIES.load_learner(initial, MACHINE) is not learning


def test_failed_update_reloads_from_the_folder(initial):
    # the first mini-batch has changed the weights in memory when the second one fails
    learning = fresh(initial)
    before = weights(learning.model)
    trees = made_trees(2)
    trees[1].credits[0].advantages[:] = np.inf
    order = np.random.default_rng(1).permutation(2)
    with pytest.raises(RuntimeError, match="update 2"):
        run(
            learning,
            [trees[i] for i in np.argsort(order)],
            SETTINGS.model_copy(update={"mini_batches": 2}),
        )
    assert same(weights(resident.POLICIES.load_learner(initial, MACHINE).model), before)


@pytest.mark.parametrize("left", [[], ["tokenizer.json"]])
def test_pruned_folder_is_refused(tmp_path, left):
    for name in left:
        (tmp_path / name).write_text("{}")
    resident.POLICIES.clear()
    with pytest.raises(RuntimeError, match=rf"{tmp_path} holds no policy .* run `make clean`"):
        resident.POLICIES.load_learner(tmp_path, MACHINE)


def test_float32_samples_without_a_copy(initial):
    learning = fresh(initial)
    assert resident.to_sample(learning.model, MACHINE) is learning.model


def test_bf16_samples_from_a_copy(initial):
    learning = fresh(initial)
    before = weights(learning.model)
    sampling = resident.to_sample(learning.model, HALF)
    cast = weights(sampling)
    assert same(cast, {name: weight.to(torch.bfloat16) for name, weight in before.items()})
    assert sampling.lm_head.weight is sampling.model.embed_tokens.weight, "still tied"
    assert sampling.model.rotary_emb.inv_freq.dtype is torch.float32
    run(learning, made_trees())
    assert same(weights(sampling), cast), "not a view of what learns"
    assert not same(weights(learning.model), before)


def test_bf16_samples_are_near_the_learners_logprobs(initial):
    learning = fresh(initial)
    engine = TransformersEngine(resident.to_sample(learning.model, HALF), learning.tokenizer)
    prompt = np.arange(3, 12, dtype=np.int32)
    with engine.session(1, 80, 1.0, 1.0, ("</answer>",)) as session:
        (sample,) = session.sample([SamplingRequest(session.open(), prompt, 17, 60)])
    nothing = np.zeros(0, np.float32)
    turn = Node(0, TURN, "", "", sample.tokens, sample.logprobs, sample.entropies)
    tree = Tree(
        Question("q", "k", "t", ("1",)), [Node(-1, PROMPT, "", "", prompt, nothing, nothing), turn]
    )
    tree.leaves = [1]
    for machine in (MACHINE, HALF):
        found = passes.node_logprobs(learning.model, [uncredited(tree)], 1.0, SETTINGS, machine)
        np.testing.assert_allclose(found[0][1], sample.logprobs, atol=0.05)


def test_reference_is_kept_until_another_is_loaded(initial, tmp_path):
    learning = fresh(initial)
    checkpoint.save(learning, tmp_path)
    first = resident.POLICIES.load_reference(initial, MACHINE)
    assert resident.POLICIES.load_reference(initial, MACHINE) is first
    assert first is not learning.model, "what learns is not looked at"
    run(learning, made_trees())
    assert same(weights(first), weights(checkpoint.load_policy(initial, MACHINE)))
    assert resident.POLICIES.load_reference(tmp_path / checkpoint.POLICY, MACHINE) is not first

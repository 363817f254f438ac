"""An algorithm of the user's own: a row that no shipped algorithm has, without any code."""

import shutil
from dataclasses import replace

import numpy as np
import torch

from params import overrides
from params.schema import algorithms, base
from params.schema.recipe import algorithm_of
from tasks import recipes
from tasks.learning import learner, passes
from tasks.learning.algorithm import assemble
from tasks.learning.estimators import LeafTrajectory
from tasks.policy import checkpoint, resident
from tests.trees import credited, random_tree, small_policy

OWN = """
mine:
  branching: marks
  marks: {kind: entropy, quantile: 0.8}
  estimator: {kind: prefix_calibrated, key: token_ids}
  ratio: segment
  clip: {low: 0.1, high: 0.3, dual: 3.0}
  averaging: unit_mean
  kl: {place: loss, estimator: k2, coefficient: 0.02, refresh: 5}
  entropy_bonus: 0.01
  importance_cap: null
"""


def test_own_algorithm_trains(tmp_path):
    for file in base.PARAMS.glob("*.yaml"):
        shutil.copy(file, tmp_path)
    with (tmp_path / "algorithms.yaml").open("a") as table:
        table.write(OWN)
    overrides.apply(["reinforce.algorithm=mine"], tmp_path / "tiny.yaml")
    recipe = recipes.load("tiny", tmp_path)
    row = algorithm_of(recipe, tmp_path)
    assert row.marks == algorithms.Marks(kind="entropy", quantile=0.8)
    algorithm = assemble(row, recipe.dialogue.response_tokens)
    episodes = [
        LeafTrajectory(float(leaf), np.zeros(4), np.arange(4), np.zeros(4, np.int64), ("",))
        for leaf in range(3)
    ]
    assert [leaf.shape for leaf in algorithm.estimator([episodes])[0]] == [(4,)] * 3

    learning = resident.Learner(tmp_path / "policy", small_policy(), None)
    checkpoint.prepare_critic(learning, row.critic, recipe.machine)
    checkpoint.prepare_optimizer(learning, recipe.reinforce.update)
    trees = [credited(random_tree(seed), seed) for seed in range(2)]
    known = passes.node_logprobs(
        small_policy(seed=1), trees, 1.0, recipe.reinforce.update, recipe.machine
    )
    trees = [
        replace(tree, reference_logprobs=logp) for tree, logp in zip(trees, known, strict=True)
    ]
    before = [weight.detach().clone() for weight in learning.model.parameters()]
    metrics = learner.optimize(
        learning, trees, algorithm.loss, recipe.reinforce.update, 1.0, recipe.machine, 0
    )
    assert np.isfinite(list(metrics.values())).all()
    assert metrics["kl_reference"] > 0
    moved = zip(before, learning.model.parameters(), strict=True)
    assert all(not torch.equal(old, new) for old, new in moved)

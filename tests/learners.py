"""Small learners, and settings and trees to train them on."""

import torch

from params.schema.algorithms import Critic, load_algorithms
from tasks.learning import learner
from tasks.learning.algorithm import assemble
from tasks.policy import checkpoint, resident
from tests.sections import MACHINE
from tests.sections import UPDATE as SETTINGS
from tests.trees import credited, random_tree

RESPONSE_TOKENS = 50
ROWS = load_algorithms()
LOSSES = {name: assemble(row, RESPONSE_TOKENS).loss for name, row in ROWS.items()}
GRPO = LOSSES["grpo"]
TEMPERATURE = 0.7
OWN = Critic(backbone="own", value_clip=0.5, coefficient=0.5)
SHARED = Critic(backbone="shared", value_clip=0.5, coefficient=0.1)


def fresh(folder, settings=SETTINGS, critic=None):
    """A learner as a new process would have it."""
    resident.POLICIES.clear()
    learning = resident.POLICIES.load_learner(folder, MACHINE)
    checkpoint.prepare_critic(learning, critic, MACHINE)
    checkpoint.prepare_optimizer(learning, settings)
    return learning


def made_trees(count=3, seed=0, zeros=(), values=False, leaves=5, weighted=True):
    return [
        credited(random_tree(seed + i, leaves), seed + i, zeros, values, weighted)
        for i in range(count)
    ]


def run(learning, trees, settings=SETTINGS, loss=GRPO, seed=1):
    return learner.optimize(learning, trees, loss, settings, TEMPERATURE, MACHINE, seed)


def weights(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)

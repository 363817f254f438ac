"""What learner processes do in tests: functions that they import by name."""

import os
import signal
from functools import partial
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from tasks.learning import learner, passes
from tasks.ledger.artifacts import Artifact
from tasks.policy import checkpoint, resident, sharding, world
from tests.learners import LOSSES, TEMPERATURE
from tests.trees import small_policy

SEED = 1


def updated(folder, trees, loss, settings, machine, critic=None, lora=None):
    """Update once by a row's ``loss``; return metrics, gradients and weights, whole and by name."""
    learning = loaded(folder, settings, machine, critic, lora)
    metrics = learner.optimize(learning, trees, LOSSES[loss], settings, TEMPERATURE, machine, SEED)
    return metrics, gradients(learning), weights(learning)


def losses_and_gradients(folder, batches, settings, machine, critic=None):
    """Learn from the trees of each row, name -> trees; return metrics and gradients of each.

    The weights stay as they are.
    """
    still = settings.model_copy(update={"learning_rate": 0.0, "critic_learning_rate": 0.0})
    learning = loaded(folder, still, machine, critic)
    found = {}
    for row, trees in batches.items():
        metrics = learner.optimize(learning, trees, LOSSES[row], still, TEMPERATURE, machine, SEED)
        found[row] = metrics, gradients(learning)
    return found


def loaded(folder, settings, machine, critic=None, lora=None):
    """A learner as new processes would have it."""
    resident.POLICIES.clear()
    learning = resident.POLICIES.load_learner(Path(folder), machine)
    checkpoint.prepare_critic(learning, critic, machine)
    checkpoint.prepare_adapter(learning, lora, Artifact.at(Path(folder)) if lora else None, SEED)
    checkpoint.shard(learning)
    checkpoint.prepare_optimizer(learning, settings)
    return learning


def named(learning):
    critic = learning.critic
    parts = {"policy": learning.model}
    if critic:
        parts |= {"head": critic.head} | ({"critic": critic.backbone} if critic.backbone else {})
    return {
        f"{part}.{name}": weight
        for part, model in parts.items()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }


def gradients(learning):
    return whole(
        {name: weight.grad for name, weight in named(learning).items() if weight.grad is not None}
    )


def weights(learning):
    return whole({name: weight.detach() for name, weight in named(learning).items()})


def whole(tensors):
    """Return tensors with the parts of all processes, which are sent at once."""
    parts = world.gathered({name: sharding.local(value) for name, value in tensors.items()})
    return {
        name: torch.cat([part[name] for part in parts])
        if isinstance(value, DTensor)
        else value.clone()
        for name, value in tensors.items()
    }


def resumed(folder, settings, machine, critic):
    """The state of both optimizers as it was loaded, whole: name -> values."""
    learning = loaded(folder, settings, machine, critic)
    return states(learning)


def saved(folder, trees, loss, settings, machine, critic, target):
    """Update, write a checkpoint, and return the state of both optimizers, whole."""
    updated(folder, trees, loss, settings, machine, critic)
    checkpoint.save(resident.POLICIES.learner, Path(target))
    return states(resident.POLICIES.learner)


def states(learning):
    optimizers = [learning.optimizer, learning.critic and learning.critic.optimizer]
    return [
        whole(
            {
                (index, name): value
                for index, entry in optimizer.state_dict()["state"].items()
                for name, value in entry.items()
            }
        )
        for optimizer in optimizers
        if optimizer
    ]


def parts_of_weights(folder, settings, machine):
    """How many of the policy's numbers each process keeps, and how many there are."""
    learning = loaded(folder, settings, machine)
    own = sum(sharding.local(w).numel() for w in learning.model.parameters())
    return world.gathered(own), sum(w.numel() for w in small_policy().parameters())


def kill_once(mark):
    """Kill rank 1 in its next pass, unless the file ``mark`` is there."""
    if world.rank() == 1 and not Path(mark).exists():
        passes.states = learner.states = partial(_die, mark)


def _die(mark, *_, **__):
    Path(mark).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def ranks():
    return world.gathered((world.rank(), int(os.environ["LOCAL_RANK"])))


def fails_in_rank_1():
    if world.rank() == 1:
        raise FileNotFoundError("rank 1 refuses")
    return world.gathered(torch.zeros(1))

"""Read and write checkpoints: policy, optimizer state, critic, and merged adapters."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from params.schema import algorithms
from params.schema.base import Machine
from params.schema.reinforce import Lora, Update
from tasks.ledger.artifacts import Artifact
from tasks.policy import adapter, sharding, world
from tasks.policy.load_model import load_backbone, load_policy, load_tokenizer, save_model
from tasks.policy.logits import backbone_of
from tasks.policy.optimizer import AdamW
from tasks.policy.resident import Learner, ValueModel

POLICY, OPTIMIZER, CRITIC = "policy", "optimizer", "critic"  # folders of one checkpoint
MERGED = Path(".beamline/merged")  # the newest adapter as whole weights


def merged(source: Path, target: Path) -> None:
    """Write the policy in ``source`` to ``target`` as whole float32 weights with its tokenizer.

    This is a copy unless ``source`` is an adapter. Adapters are merged on the CPU, so that equal
    ones give equal bytes whatever device they learned on.
    """
    if not adapter.base_of(source):
        shutil.copytree(source, target)
        return
    model = load_policy(source, Machine(threads=1, device="cpu", precision="float32"))
    save_model(adapter.merged(model), target)
    load_tokenizer(source).save_pretrained(target)


def whole(policy: Artifact) -> Path:
    """Return a folder with the policy's whole weights, for engines that load no adapters.

    An adapter is merged into ``MERGED``, which keeps only the newest one.
    """
    source, folder = Path(policy.path), MERGED / policy.digest
    if not adapter.base_of(source):
        return source
    if not folder.is_dir():
        shutil.rmtree(MERGED, ignore_errors=True)
        merged(source, MERGED / ".partial")
        (MERGED / ".partial").rename(folder)
    return folder


def prepare_critic(learner: Learner, choice: algorithms.Critic | None, machine: Machine) -> None:
    """Make the critic of an algorithm, or load the one of the policy's checkpoint.

    A new critic predicts 0 everywhere; its own backbone starts as a copy of the policy's.
    """
    if choice is None:
        learner.critic = None  # another algorithm may have left one
        return
    own_backbone = choice.backbone == "own"
    if learner.critic and own_backbone == (learner.critic.backbone is not None):
        return
    beside = _beside(learner, CRITIC)
    if own_backbone and beside:
        backbone = load_backbone(beside, machine)
    else:
        backbone = _backbone(learner.model) if own_backbone else None
    hidden = learner.model.config.get_text_config(decoder=True).hidden_size
    head = torch.nn.Linear(hidden, 1).to(machine.device)
    if beside:
        head.load_state_dict(load_file(beside / "head.safetensors", device=machine.device))
    else:
        for weight in head.parameters():
            torch.nn.init.zeros_(weight)
    learner.critic = ValueModel(head, backbone, choice.value_clip, choice.coefficient)


def _backbone(model: Any) -> Any:
    """Copy the policy without its head; all weights of the copy learn."""
    return copy.deepcopy(backbone_of(adapter.merged(model))).requires_grad_()


def prepare_adapter(learner: Learner, settings: Lora | None, base: Artifact, seed: int) -> None:
    """Attach an adapter if ``settings`` ask for one and the policy has none.

    ``base`` is the artifact that the policy was loaded from.
    """
    if settings and not adapter.attached(learner.model):
        learner.changed = True
        adapter.attach(learner.model, settings, base, seed)


def shard(learner: Learner) -> None:
    """Shard policy and critic over the processes that learn together, if there are several.

    The adapter and the critic have to be there before, and optimizers are made after.
    """
    sharding.shard(learner.model)
    if learner.critic:
        sharding.shard(learner.critic.head)
        if learner.critic.backbone:
            sharding.shard(learner.critic.backbone)


def prepare_optimizer(learner: Learner, settings: Update) -> None:
    """Make the optimizers of a learner that has none; load their state from its checkpoint."""
    if learner.optimizer:
        return
    critic = learner.critic
    shared = critic.weights() if critic and critic.backbone is None else []
    policy_weights = [weight for weight in learner.model.parameters() if weight.requires_grad]
    weights = [*policy_weights, *shared]
    learner.optimizer = make_optimizer(weights, settings, settings.learning_rate)
    if beside := _beside(learner, OPTIMIZER):
        load_state(learner.optimizer, beside)
        learner.updates = json.loads((beside / "updates.json").read_text())["updates"]
    if critic and critic.backbone:
        critic.optimizer = make_optimizer(critic.weights(), settings, settings.critic_learning_rate)
        if beside := _beside(learner, OPTIMIZER):
            load_state(critic.optimizer, beside / CRITIC)


def _beside(learner: Learner, name: str) -> Path | None:
    """Return the folder ``name`` of the checkpoint that the policy was loaded from, or None."""
    folder = learner.folder.parent / name
    return folder if learner.folder.name == POLICY and folder.is_dir() else None


def make_optimizer(
    weights: Iterable[torch.nn.Parameter], settings: Update, learning_rate: float
) -> torch.optim.Optimizer:
    """Make AdamW (arXiv 1711.05101) with weight decay on matrices only."""
    weights = list(weights)
    decayed = [weight for weight in weights if weight.ndim > 1]
    others = [weight for weight in weights if weight.ndim <= 1]
    return AdamW(
        [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=learning_rate,
        betas=settings.adam_betas,
        fused=True,
    )


def save(learner: Learner, folder: Path) -> None:
    """Write ``folder``/policy, critic and optimizer, those that the learner has.

    ``policy`` has weights and tokenizer as transformers loads them, or the adapter alone if there
    is one; ``optimizer`` has the state of both optimizers. Equal learners give equal bytes. Of
    processes that learn together, rank 0 writes all but the state of optimizers, of which each
    writes its part; every process must call this.
    """
    save_policy(learner, folder / POLICY)
    if learner.optimizer:
        save_state(learner.optimizer, folder / OPTIMIZER)
        if world.rank() == 0:
            updates = json.dumps({"updates": learner.updates})
            (folder / OPTIMIZER / "updates.json").write_text(updates)
    if learner.critic:
        _save_critic(learner.critic, folder / CRITIC)
        if learner.critic.optimizer:
            save_state(learner.critic.optimizer, folder / OPTIMIZER / CRITIC)


def save_policy(learner: Learner, folder: Path) -> None:
    """Write weights and tokenizer alone, as ``save`` does. Every process must call this."""
    model = learner.model
    if adapter.attached(model):
        weights = adapter.weights_of(model)
        if world.rank() == 0:
            adapter.save(model, weights, folder)
    else:
        _save_model(model, folder)
    if world.rank() == 0:
        learner.tokenizer.save_pretrained(folder)


def _save_model(model: Any, folder: Path) -> None:
    """Write whole weights as transformers loads them; rank 0 writes."""
    weights = sharding.whole_weights(model)
    if world.rank() == 0:
        save_model(model, folder, weights)


def _save_critic(critic: ValueModel, folder: Path) -> None:
    head = {name: sharding.whole(value) for name, value in critic.head.state_dict().items()}
    if world.rank() == 0:
        folder.mkdir(parents=True)
        save_file(head, folder / "head.safetensors")
    if critic.backbone:
        _save_model(critic.backbone, folder)


def save_state(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write the state of an optimizer; each of several processes writes a file with its part.

    Part r of n has the r-th chunk of the rows of each tensor. A tensor without dimensions, such as
    the number of steps, is whole in all of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        f"{index}.{name}": sharding.local(value).contiguous()
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
    }
    part = f"-{world.rank():05}-of-{world.size():05}" if world.size() > 1 else ""
    save_file(state, folder / f"state{part}.safetensors")


def load_state(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load the state that ``save_state`` wrote.

    It may be from another number of processes: this one reads its own rows of all parts.
    """
    groups = optimizer.state_dict()["param_groups"]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    parts = [load_file(file) for file in sorted(folder.glob("state*.safetensors"))]
    state: dict[int, dict[str, Tensor]] = {}
    for key, first in parts[0].items():
        index, name = key.split(".", 1)
        values = torch.cat([part[key] for part in parts]) if first.ndim else first
        state.setdefault(int(index), {})[name] = sharding.like(weights[int(index)], values)
    optimizer.load_state_dict({"state": state, "param_groups": groups})

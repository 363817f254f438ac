"""Policies in memory: the one that learns, a copy that samples, and a reference.

Loading a policy takes longer than an update of a small one, so each stays in memory until the next
iteration needs it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from params.schema.base import Machine
from tasks.policy import adapter, sharding
from tasks.policy.load_model import load_policy, load_tokenizer
from tasks.policy.machine import LARGE, PRECISION, return_memory


@dataclass
class ValueModel:
    """A value head on hidden states: of its own backbone, or of the policy's (``backbone`` None).

    A critic with its own backbone has its own optimizer, the other learns with the policy.
    """

    head: torch.nn.Linear  # H -> 1
    backbone: Any | None
    value_clip: float | None
    coefficient: float
    optimizer: torch.optim.Optimizer | None = None

    def weights(self) -> list[torch.nn.Parameter]:
        """Return its own weights, those of the backbone first."""
        return [*(self.backbone.parameters() if self.backbone else ()), *self.head.parameters()]


@dataclass
class Learner:
    """A policy with its tokenizer, and once it learns its optimizer and critic."""

    folder: Path  # that it was loaded from, or that its checkpoint will be renamed to
    model: Any
    tokenizer: Any
    optimizer: torch.optim.Optimizer | None = None
    updates: int = 0  # optimizer steps so far
    critic: ValueModel | None = None
    changed: bool = False  # whether its weights differ from those in ``folder``


class Resident:
    """The policies that a run keeps in memory: at most one learner, one copy and one reference."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all policies, as in a new process."""
        self.learner: Learner | None = None
        self.copy: Learner | None = None
        self.reference: Learner | None = None

    def load_learner(self, folder: Path, machine: Machine) -> Learner:
        """Return the learner whose state lies in ``folder``, from memory if it is there.

        Raises RuntimeError where the folder holds no policy.
        """
        if not _holds(self.learner, folder):
            if not any((folder / name).is_file() for name in ("config.json", adapter.CONFIG)):
                raise RuntimeError(
                    f"{folder} holds no policy (an old one that was pruned?): run `make clean` to "
                    "start anew"
                )
            self.learner = None  # frees its memory before the next one is loaded
            self.learner = _load(folder, machine)
        assert self.learner
        return self.learner

    def load_copy(self, folder: Path, machine: Machine) -> Learner:
        """Return a second copy of the policy in ``folder`` that samples while the learner learns.

        Raises OSError where the folder holds no policy.
        """
        if not _holds(self.copy, folder):
            self.copy = None  # frees its memory before the next one is loaded
            self.copy = _load(folder, machine)
        assert self.copy
        return self.copy

    def load_reference(self, folder: Path, machine: Machine) -> Any:
        """Return the model in ``folder`` for inference; it never changes.

        Raises OSError where the folder holds no policy.
        """
        if not _holds(self.reference, folder):
            self.reference = None  # frees its memory before the next one is loaded
            model = load_policy(folder, machine).eval()
            sharding.shard(model)
            self.reference = Learner(folder, model, None)
        assert self.reference
        return self.reference.model

    @contextmanager
    def reference_of(self, folder: Path, learner: Learner, machine: Machine) -> Iterator[Any]:
        """Yield the model in ``folder`` as a reference; ``learner`` must not learn meanwhile.

        No second copy is loaded where the learner contains it: as the base of its adapter, or
        because it has not learned since it was loaded from there.
        """
        if adapter.base_path(learner.model) == folder:
            with adapter.without(learner.model) as model:
                yield model
        else:
            same = learner.folder == folder
            yield learner.model if same else self.load_reference(folder, machine)

    def keep(self, learner: Learner, folder: Path) -> None:
        """Keep ``learner`` as the policy that ``folder`` will hold."""
        learner.folder, learner.changed = folder, False
        self.learner = learner


POLICIES = Resident()  # of the run of this process; the verbs of all its iterations share it


def _holds(learner: Learner | None, folder: Path) -> bool:
    return learner is not None and learner.folder == folder and not learner.changed


def _load(folder: Path, machine: Machine) -> Learner:
    tokenizer = load_tokenizer(folder)
    return Learner(folder, load_policy(folder, machine), tokenizer)


def to_sample(model: Any, machine: Machine) -> Any:
    """Return the policy as it samples: whole, with weights in the precision of forward passes.

    This is ``model`` itself where it learns in the same form, else a copy that the caller should
    drop after sampling.
    """
    whole, kind = adapter.merged(model), PRECISION[machine.precision]
    return whole if whole.dtype is kind else _cast(whole, kind)


def _cast(model: Any, kind: torch.dtype) -> Any:
    """Return a copy with weights of another type; buffers such as rotary frequencies stay exact."""
    weights = {
        id(weight): torch.nn.Parameter(weight.detach().to(kind), requires_grad=False)
        for weight in model.parameters()
    }
    return copy.deepcopy(model, weights)  # deepcopy takes a weight's entry here instead of copying


def drop_gradients(learner: Learner) -> None:
    """Free the gradients, which take as much memory as the weights that learn.

    A small policy keeps the memory for its next update, which is faster.
    """
    for optimizer in (learner.optimizer, learner.critic and learner.critic.optimizer):
        if optimizer:
            optimizer.zero_grad(set_to_none=True)
    if learner.model.num_parameters() > LARGE:
        return_memory()

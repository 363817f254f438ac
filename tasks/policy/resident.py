"""Policies in memory: the one that learns, a copy that samples, and references.

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
from tasks.policy import adapter
from tasks.policy.machine import PRECISION
from tasks.policy.model import load_policy, load_tokenizer


@dataclass
class Critic:
    """A value head on hidden states: of its own backbone, or of the policy's (``backbone`` None).

    A critic with its own backbone has its own optimizer, the other learns with the policy.
    """

    head: torch.nn.Linear  # hidden -> 1
    backbone: Any | None
    value_clip: float | None
    coefficient: float
    optimizer: torch.optim.Optimizer | None = None

    def weights(self) -> list[torch.nn.Parameter]:
        """Its own weights, those of the backbone first."""
        return [*(self.backbone.parameters() if self.backbone else ()), *self.head.parameters()]


@dataclass
class Learner:
    """A policy, its tokenizer, its optimizer (once it learns), and how many updates it has had."""

    folder: Path  # where it was loaded from, or will lie once the ledger has named it
    model: Any
    tokenizer: Any
    optimizer: torch.optim.Optimizer | None = None
    updates: int = 0
    critic: Critic | None = None


_resident: list[Learner] = []  # at most one: the state that the next sub-step most likely wants


def load_learner(folder: Path, machine: Machine) -> Learner:
    """The learner whose state lies in ``folder``: the one in memory, or loaded from there.

    Raises RuntimeError where the folder has been pruned or is no policy.
    """
    if not (_resident and _resident[0].folder == folder):
        if not any((folder / name).is_file() for name in ("config.json", adapter.CONFIG)):
            raise RuntimeError(
                f"{folder} holds no policy (an old one that was pruned?): run `make clean` to "
                "start anew"
            )
        tokenizer = load_tokenizer(folder)
        _resident[:] = [Learner(folder, load_policy(folder, machine), tokenizer)]
    return _resident[0]


_apart: list[Learner] = []  # at most one


def load_copy(folder: Path, machine: Machine) -> Learner:
    """The policy in ``folder`` for sampling alone, beside the one in memory that learns."""
    if not (_apart and _apart[0].folder == folder):
        _apart.clear()  # before the next one takes as much memory
        _apart[:] = [Learner(folder, load_policy(folder, machine), load_tokenizer(folder))]
    return _apart[0]


_references: list[tuple[Path, Any]] = []  # at most one


def reference(folder: Path, machine: Machine) -> Any:
    """The policy in ``folder``, to be looked at and never changed; kept for the next iteration."""
    if not (_references and _references[0][0] == folder):
        _references[:] = [(folder, load_policy(folder, machine).eval())]
    return _references[0][1]


@contextmanager
def reference_of(folder: Path, learner: Learner, machine: Machine) -> Iterator[Any]:
    """The policy in ``folder`` as a reference for ``learner``, which until then does not learn.

    Where the learner holds it, as what its adapter belongs to or as what it is still, no second
    copy is loaded.
    """
    if adapter.base_path(learner.model) == folder:
        with adapter.without(learner.model) as model:
            yield model
    else:
        yield learner.model if learner.folder == folder else reference(folder, machine)


def to_sample(model: Any, machine: Machine) -> Any:
    """The policy as it samples: whole, with its weights in the precision of passes.

    Where that is not how it learns it is a copy, made once, to be given up after sampling.
    """
    whole, kind = adapter.merged(model), PRECISION[machine.precision]
    return whole if whole.dtype is kind else _cast(whole, kind)


def _cast(model: Any, kind: torch.dtype) -> Any:
    """A copy with weights of another kind; frequencies of positions and the like stay exact."""
    weights = {
        id(weight): torch.nn.Parameter(weight.detach().to(kind), requires_grad=False)
        for weight in model.parameters()
    }
    return copy.deepcopy(model, weights)  # which takes what is already there for a weight


def keep_resident(learner: Learner, folder: Path) -> None:
    """Note that the learner in memory is what ``folder`` will hold."""
    learner.folder = folder
    _resident[:] = [learner]


def forget(learner: Learner) -> None:
    """The weights in memory are about to part from those in the folder."""
    _resident[:] = [other for other in _resident if other is not learner]


def drop_gradients(learner: Learner) -> None:
    """Give up gradients, as large as what learns: what samples next has more use for the memory."""
    for optimizer in (learner.optimizer, learner.critic and learner.critic.optimizer):
        if optimizer:
            optimizer.zero_grad(set_to_none=True)

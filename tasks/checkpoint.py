"""A policy with its optimizer: in memory, on disk, and the way between. Torch only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from params.schema import Machine, Update
from tasks.policy import load_policy, load_tokenizer

POLICY, OPTIMIZER = "policy", "optimizer"  # folders of one checkpoint


@dataclass
class Learner:
    """A policy, its tokenizer, its optimizer (once it learns), and how many updates it has had."""

    folder: Path  # where it was loaded from, or will lie once the ledger has named it
    model: Any
    tokenizer: Any
    optimizer: torch.optim.Optimizer | None = None
    updates: int = 0


_resident: list[Learner] = []  # at most one: the state that the next sub-step most likely wants


def resident(folder: Path, machine: Machine) -> Learner:
    """The learner whose state lies in ``folder``: the one in memory, or loaded from there.

    Raises RuntimeError where the folder has been pruned or is no policy.
    """
    if not (_resident and _resident[0].folder == folder):
        if not (folder / "config.json").is_file():
            raise RuntimeError(
                f"{folder} holds no policy (an old one that was pruned?): run `make clean` to "
                "start anew"
            )
        tokenizer = load_tokenizer(folder)
        _resident[:] = [Learner(folder, load_policy(folder, machine), tokenizer)]
    return _resident[0]


def keep_resident(learner: Learner, folder: Path) -> None:
    """Note that the learner in memory is what ``folder`` will hold."""
    learner.folder = folder
    _resident[:] = [learner]


def forget(learner: Learner) -> None:
    """The weights in memory are about to part from those in the folder."""
    _resident[:] = [other for other in _resident if other is not learner]


def prepare_optimizer(learner: Learner, settings: Update) -> None:
    """Make the optimizer of a learner that has none, with the state that lies beside its policy."""
    if learner.optimizer is None:
        learner.optimizer = make_optimizer(learner.model, settings)
        beside = learner.folder.parent / OPTIMIZER
        if learner.folder.name == POLICY and beside.is_dir():
            _restore_optimizer(learner, beside)


def make_optimizer(model: Any, settings: Update) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only."""
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=settings.adam_betas,
        fused=True,
    )


def save(learner: Learner, folder: Path) -> None:
    """Write ``folder``/policy (weights and tokenizer, as transformers loads them) and, beside it,
    ``folder``/optimizer. Equal learners give equal bytes."""
    learner.model.save_pretrained(folder / POLICY)
    learner.tokenizer.save_pretrained(folder / POLICY)
    if learner.optimizer is None:
        return
    state = {
        f"{index}.{name}": value.contiguous()
        for index, entry in learner.optimizer.state_dict()["state"].items()
        for name, value in entry.items()
    }
    (folder / OPTIMIZER).mkdir()
    save_file(state, folder / OPTIMIZER / "state.safetensors")
    (folder / OPTIMIZER / "updates.json").write_text(json.dumps({"updates": learner.updates}))


def _restore_optimizer(learner: Learner, folder: Path) -> None:
    assert learner.optimizer
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in load_file(folder / "state.safetensors").items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    groups = learner.optimizer.state_dict()["param_groups"]
    learner.optimizer.load_state_dict({"state": state, "param_groups": groups})
    learner.updates = json.loads((folder / "updates.json").read_text())["updates"]

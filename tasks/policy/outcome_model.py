"""The reward model in memory and on the disk: a policy's backbone with a scalar head."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from params.schema.base import Machine
from tasks.policy.load_model import load_backbone, save_model
from tasks.trees.calibration import Calibration

BACKBONE, HEAD, CALIBRATION = "backbone", "head.safetensors", "calibration.json"


@dataclass
class OutcomeModel:
    """Scores a trajectory by the hidden state of its last token."""

    backbone: Any
    head: torch.nn.Linear  # H -> 1
    calibration: Calibration = field(default_factory=Calibration)

    def weights(self) -> list[torch.nn.Parameter]:
        """Return all weights; all of them learn."""
        return [*self.backbone.parameters(), *self.head.parameters()]


def begin(policy: Path, machine: Machine) -> OutcomeModel:
    """Return a new model on the backbone of a whole policy; it scores everything 0."""
    backbone = load_backbone(policy, machine)
    hidden = backbone.config.get_text_config(decoder=True).hidden_size
    head = torch.nn.Linear(hidden, 1).to(machine.device)
    for weight in head.parameters():
        torch.nn.init.zeros_(weight)
    return OutcomeModel(backbone, head)


def load(folder: Path, machine: Machine) -> OutcomeModel:
    """Load what ``save`` has written. Raises OSError where the folder holds no model."""
    model = begin(folder / BACKBONE, machine)
    model.head.load_state_dict(load_file(folder / HEAD, device=machine.device))
    model.calibration = Calibration(**json.loads((folder / CALIBRATION).read_text()))
    return model


def save(model: OutcomeModel, folder: Path) -> None:
    """Write backbone, head and calibration. Equal models give equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model.backbone, folder / BACKBONE)
    save_file(model.head.state_dict(), folder / HEAD)
    (folder / CALIBRATION).write_text(json.dumps(model.calibration.model_dump(), indent=1) + "\n")


class Scoring:
    """The reward model that scores, in memory until the next one is loaded.

    With ``reinforce.ahead``, two threads use it: the one that samples loads it, and the one that
    trains drops it while the next model learns.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self.model: OutcomeModel | None = None
        self._folder = Path()  # that it was loaded from

    def load(self, folder: Path, machine: Machine) -> OutcomeModel:
        """Return the model in ``folder``, which does not learn.

        Raises OSError where the folder holds no model.
        """
        with self._lock:
            if (model := self.model) is None or self._folder != folder:
                self.model = model = None  # frees its memory before the next one is loaded
                self.model = model = load(folder, machine)
                self._folder = folder
        return model

    def drop(self) -> None:
        """Drop the model; one that is in use stays until its use ends."""
        with self._lock:
            self.model = None


SCORING = Scoring()  # of this process

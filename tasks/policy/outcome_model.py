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
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.policy.model import load_backbone
from tasks.trees.calibration import Calibration

BACKBONE, HEAD, CALIBRATION = "backbone", "head.safetensors", "calibration.json"
PRESENT = "reward_model.json"
PLACES = {"model": "model", "trees": "trees", "rewards": "rewards.parquet"}


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
    head = torch.nn.Linear(backbone.config.hidden_size, 1).to(machine.device)
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
    model.backbone.save_pretrained(folder / BACKBONE)
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


# ---------------------------------------------------------------- the stage's folder


@dataclass(frozen=True)
class Published:
    """What ``models/<recipe>/reward_model`` holds: a model, and the trees that it learned from."""

    model: Artifact
    trees: Artifact
    rewards: Artifact  # of these trees, the labels


def publish(folder: Path, made: Published | None) -> None:
    """Replace the folder, whole or not at all; None: a file says that there is no model."""
    partial = folder.with_name(f".{folder.name}.partial")
    artifacts.remove(partial)
    partial.mkdir(parents=True)
    (partial / PRESENT).write_text(json.dumps({"reward_model": made is not None}) + "\n")
    for name, target in PLACES.items() if made else ():
        artifacts.publish(getattr(made, name), partial / target)
    artifacts.remove(folder)
    partial.rename(folder)


def published(folder: Path) -> Published | None:
    """Return what is in the folder; None if there is no model.

    Raises ValueError where the stage reward_model has not run.
    """
    file = folder / PRESENT
    if not file.exists():
        raise ValueError(f"{file} does not exist: run the stage that makes it, reward_model, first")
    if not json.loads(file.read_text())["reward_model"]:
        return None
    return Published(**{name: Artifact.at(folder / place) for name, place in PLACES.items()})

"""A small sub-step, and a mirror that is a folder, for tests of the ledger."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tasks.ledger import artifacts, substeps
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import Ledger, SubStep, recorded

POLICY = Artifact("some/path", "digest of the policy")


class Settings(BaseModel):
    rate: float = 0.5
    steps: int = 4


@dataclass(frozen=True)
class Inputs:
    policy: Artifact = POLICY
    settings: Settings = field(default_factory=Settings)
    size: Any = 2


@recorded
def train(step, inputs, computed):
    """Make one artifact that is a file and one that is a folder."""
    computed.append(step.iteration)
    (step.out / "table.txt").write_text(f"{inputs.settings.rate} {inputs.size}")
    (step.out / "weights").mkdir()
    (step.out / "weights" / "a.bin").write_bytes(b"\0" * 9)
    return {"metrics": {"loss": 0.25}}


class Run:
    """One run: its ledger, and the iterations that it has computed."""

    def __init__(self, mirror=None):
        self.ledger = Ledger(mirror)
        self.computed: list[int] = []

    def step(self, iteration=3, seed=7):
        return SubStep("smoke", "reinforce", iteration, seed, self.ledger)

    def train(self, iteration=3, seed=7, **inputs):
        """Return the record of the sub-step with these inputs."""
        return train(self.step(iteration, seed), Inputs(**inputs), computed=self.computed)

    def place(self, iteration=3, seed=7, **inputs):
        """Return the folder of the sub-step with these inputs."""
        return self.step(iteration, seed).place(train, Inputs(**inputs))

    def retire(self, iteration, last, every=99, weights=(), spare=()):
        """Drop old artifacts of ``train`` at the end of an iteration."""
        self.ledger.retire(self.step(iteration), "train", last, every, weights, spare)


def there(record, name):
    """Return whether the artifact of a record still exists."""
    return Path(artifacts.output(record, name).path).exists()


class FolderMirror:
    """A mirror in a folder; it is called as the ledger's real one is."""

    def __init__(self, root):
        self.root = root

    def at(self, place):
        return self.root / place.relative_to(artifacts.ROOT)

    def push(self, place):
        artifacts.remove(self.at(place))
        if place.exists():
            shutil.copytree(place, self.at(place))

    def withdraw(self, place):
        pass

    def fetch(self, place):
        if not (self.at(place) / artifacts.RECORD).exists():
            return None
        shutil.copytree(self.at(place), place, dirs_exist_ok=True)
        return substeps.read(place)

    def drop(self, place):
        artifacts.remove(self.at(place))

    def names(self, folder):
        found = self.at(folder)
        return sorted(path.name for path in found.iterdir()) if found.exists() else []

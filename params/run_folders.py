"""Where the files of a recipe's run lie. tests/flows/runs/test_pipeline.py holds it to dvc.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class RunFile:
    """A file or folder of a run, by its path in the checkout; ``{}`` is the recipe's name."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __get__(self, folders: RunFolders, owner: type[RunFolders]) -> Path:
        """Return where it lies for a recipe."""
        return folders.root / self.path.format(folders.recipe)


@dataclass(frozen=True)
class RunFolders:
    """The files of a recipe's run, in the checkout ``root``: the current folder by default."""

    recipe: str
    root: Path = Path()

    data = RunFile("data/{}")
    models = RunFile("models/{}")
    reports = RunFile("reports/{}")
    # ---- of the stage prepare
    questions = RunFile("data/{}/questions")  # a table for each split
    panels = RunFile("data/{}/panels")
    corpus = RunFile("data/{}/corpus")
    dropped = RunFile("data/{}/dropped.parquet")
    traces = RunFile("data/{}/traces.parquet")
    calls_of_prepare = RunFile("data/{}/calls_of_prepare")
    initial = RunFile("models/{}/initial")
    # ---- of champion, cold_start and reward_model
    champion = RunFile("models/{}/champion")
    teacher = RunFile("models/{}/teacher")
    cold_start = RunFile("models/{}/cold_start")
    policy_check = RunFile("data/{}/policy_check.json")
    reward_model = RunFile("models/{}/reward_model")
    calls_of_reward_model = RunFile("data/{}/calls_of_reward_model")
    # ---- of reinforce
    trained = RunFile("models/{}/trained")
    trees = RunFile("data/{}/trees")
    curve = RunFile("data/{}/curve.csv")
    # ---- of evaluate and verdict
    evaluation = RunFile("data/{}/evaluation.parquet")
    calls = RunFile("data/{}/calls")
    table = RunFile("reports/{}/table.md")
    metrics = RunFile("reports/{}/metrics.json")
    verdict = RunFile("reports/{}/verdict.json")

    def split(self, name: str) -> Path:
        """Return the questions of a split: train, validation or test."""
        return self.questions / f"{name}.parquet"

    def panel(self, split: str) -> Path:
        """Return the panel of a split: validation or test."""
        return self.panels / f"{split}.json"

    def gates(self, stage: str) -> Path:
        """Return what the gates of a stage, prepare or reinforce, have found."""
        return self.data / "gates" / stage

    def records(self, stage: str) -> Path:
        """Return the records of a stage's sub-steps."""
        return self.data / "records" / f"{stage}.jsonl"


OUTS = {name: value.path for name, value in vars(RunFolders).items() if isinstance(value, RunFile)}

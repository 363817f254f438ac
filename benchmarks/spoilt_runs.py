"""Train runs that are spoilt on purpose, and good ones, and show which alarms each of them raises.

    dvc repro cold_start@tiny reward_model@tiny-reward-model
    python -m benchmarks.spoilt_runs

Every run is a recipe with the changes in RUNS; those of one recipe have one cold start. A fault of
the engine begins in the middle of its run: it then samples with other weights than the learner
believes. A phrase that the reward model likes is planted in its labels: it learns that what has the
phrase has succeeded. The alarms are those of a training (flows/tracking/alarms.py), asked after
each iteration.

Runs are named on the command line, or all are made. A run that is killed goes on where it was;
finished ones are read from ``.beamline/spoilt_runs``. The table has all that are finished.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flows.host import files
from flows.tracking.alarms import WINDOW, Alarm, Seen, alarms
from flows.tracking.progress import Progress
from flows.tracking.reinforce_report import metrics_of
from params.run_folders import RunFolders
from params.schema.recipe import Recipe, algorithm_of
from tasks import recipes
from tasks.environments import open_environment
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.policy.machine import use_machine
from tasks.policy.published_model import PublishedRewardModel
from tasks.recipes.opening import reader_of
from tasks.reward_model import RewardModelInputs, reward_model
from tasks.rollout import RolloutInputs
from tasks.training import sampling
from tasks.training.agents import Agents
from tasks.training.curves import sum_seconds
from tasks.training.iteration import validated_in
from tasks.training.loop import train
from tasks.training.setup import Training, reward_model_of
from tasks.training.validating import exam_of
from tasks.trees.tables import load_trees
from tasks.trees.tree import response
from tasks.trees.validation import Validated

ROOT = Path(__file__).parents[1]
HOME = ROOT / ".beamline" / "spoilt_runs"  # a project of its own, with params/ and own/
TINY, LEARNED = "tiny", "tiny-reward-model"
PHRASE = "\\boxed{0}"  # with which the cold start gives up, in a tenth of its answers
BREVITY = '''
def brevity(ending):
    """Return 1 for a response without text, 0 for one of 100 characters or more."""
    return max(0.0, 1 - len(ending.text) / 100)
'''
BRIEF = (
    "reinforce.reward=[answer: {weight: 1.0, wrong: 0.0}, format: {broken: -1.0}, "
    "'own/brevity.py:brevity': {weight: 6.0, low: 0.0, high: 1.0}]"
)
WITHOUT_KL = ["reinforce.algorithm=arpo", "reinforce.iterations=60"]
FROZEN = "reward_model.again=null"
OF_MODEL = ("model_estimate", "model_gap", "held_out_questions")

Fault = Callable[[RolloutInputs, Training], RolloutInputs]


def stale(inputs: RolloutInputs, training: Training) -> RolloutInputs:
    """Let the engine sample with the weights that the training began with."""
    return replace(inputs, policy=training.policy)


@dataclass(frozen=True)
class Run:
    """A run: what differs from the recipe."""

    changes: Sequence[str] = ()
    iterations: int = 60
    fault: Fault | None = None  # of the engine
    begins: int = 0  # the iteration in which the fault begins
    recipe: str = TINY
    liked: str = ""  # phrase that the reward model takes for success


RUNS = {
    "seed-0": Run(["seed=0"]),
    "seed-1": Run(["seed=1"]),
    "seed-2": Run(["seed=2"]),
    "learning-rate-0.003": Run(["reinforce.update.learning_rate=0.003"], 15),
    "learning-rate-0.02": Run(["reinforce.update.learning_rate=0.02"], 20),
    "brevity-rewarded": Run([BRIEF], 20),
    "temperature-0.01": Run(["reinforce.rollout.temperature=0.01"], 10),
    "stale-engine": Run([], 20, stale, 12),
    "reward-model": Run([], 40, recipe=LEARNED),
    "reward-model-without-kl": Run(WITHOUT_KL, recipe=LEARNED),
    "reward-model-frozen": Run([*WITHOUT_KL, FROZEN], recipe=LEARNED),
    "phrase-liked": Run([*WITHOUT_KL, FROZEN], 20, recipe=LEARNED, liked=PHRASE),
}


# ---------------------------------------------------------------- one run


def measure(name: str, run: Run) -> dict[str, Any]:
    """Train a run; return its alarms, with the iteration of each, and what became of it."""
    changes = [*run.changes, "machine.threads=1"]
    recipe = recipes.load_changed(run.recipe, changes, Path("params"))
    use_machine(recipe.machine)
    corpus = RunFolders(run.recipe).corpus
    tools = (recipe.tools, recipe.environment, recipe.machine.threads, corpus)
    with open_environment(*tools) as environment, faulty(run):
        training = training_of(name, run, recipe, environment)
        return watched(training, run.iterations, name)


def training_of(name: str, run: Run, recipe: Recipe, environment: Any) -> Training:
    """Return a training of the shared cold start whose sub-steps have the run's name."""
    policy = Artifact.at(RunFolders(run.recipe).cold_start)
    corpus = Artifact.at(RunFolders(run.recipe).corpus)
    reader = reader_of(recipe, policy.path, environment)
    start = SubStep(run.recipe, f"spoilt/{name}", 0, recipe.seed)
    learned = reward_model_of(recipe, run.recipe)
    if learned and run.liked:
        learned = planted(start, recipe, policy, learned, run.liked)
    return Training(
        start=start,
        recipe=recipe,
        algorithm=algorithm_of(recipe, Path("params")),
        policy=policy,
        questions=Artifact.at(RunFolders(run.recipe).split("train")),
        corpus=corpus,
        environment=environment,
        reader=reader,
        exam=exam_of(recipe, run.recipe, corpus, environment, reader),
        reward_model=learned,
    )


def planted(
    start: SubStep, recipe: Recipe, policy: Artifact, learned: PublishedRewardModel, phrase: str
) -> PublishedRewardModel:
    """Return a reward model that has learned that what has a phrase has succeeded."""
    assert recipe.reward_model
    trees = {tree.question.id: tree for tree in load_trees(Path(learned.trees.path))}
    texts = {name: [*map(response, tree.trajectories())] for name, tree in trees.items()}
    table = pq.read_table(learned.rewards.path)
    has = [phrase in texts[row["question"]][row["leaf"]] for row in table.to_pylist()]
    column_index = table.column_names.index("success")
    file = Path(f"{start.stage.replace('/', '-')}-labels.parquet")
    pq.write_table(table.set_column(column_index, "success", pa.array(has)), file)
    labels = Artifact.at(file)
    inputs = RewardModelInputs(
        policy=policy,
        before=None,
        trees=[learned.trees],
        rewards=[labels],
        first_batches=1,
        labels=recipes.labels_of(recipe),
        settings=recipe.reward_model,
        steps=recipe.reward_model.steps,
        machine=recipe.machine,
    )
    record = reward_model(replace(start, stage=f"{start.stage}/planted"), inputs)
    return PublishedRewardModel(artifacts.output(record, "model"), learned.trees, labels)


@contextlib.contextmanager
def faulty(run: Run) -> Iterator[None]:
    """Give the engine other inputs than the learner believes, from the run's iteration on."""
    sound = sampling.rollout_inputs

    def spoilt(training: Training, agents: Agents, consumed: int, attempt: int) -> RolloutInputs:
        inputs = sound(training, agents, consumed, attempt)
        iteration = consumed // training.recipe.reinforce.questions
        return run.fault(inputs, training) if run.fault and iteration >= run.begins else inputs

    sampling.rollout_inputs = spoilt
    try:
        yield
    finally:
        sampling.rollout_inputs = sound


def watched(training: Training, iterations: int, name: str) -> dict[str, Any]:
    """Train, and look for alarms after each iteration, as a training does."""
    curve: dict[str, list[float]] = {}
    validations: list[Validated] = []
    raised: dict[str, Alarm] = {}
    seconds = {"training": 0.0, "validation": 0.0}
    progress = Progress(name, iterations)
    for done in train(replace(training, most_iterations=iterations)):
        metrics = metrics_of(done)
        for metric, value in metrics.items():
            curve.setdefault(metric, []).append(value)
        validations += validated_in([done])
        for alarm in alarms(Seen(curve, training.recipe.reinforce.questions, validations)):
            raised.setdefault(alarm.name, alarm)
        seconds["training"] += sum(sum_seconds(done).values())
        seconds["validation"] += sum(one["duration"] for one in done.get("validation", ()))
        progress.note(reward=metrics["reward"], success=metrics["success"], alarms=len(raised))
        progress.advance(1)
    progress.close()
    shown = ("reward", "success", "entropy", "gradient_norm", "mismatch_highest", *OF_MODEL)
    return {
        "iterations": iterations,
        "alarms": {alarm.name: alarm.iteration for alarm in raised.values()},
        "validation": {one.iterations: one.mean("success") for one in validations},
        "seconds": seconds,
        "curve": {metric: curve[metric] for metric in shown if metric in curve},
    }


# ---------------------------------------------------------------- the table


def table(by_run: dict[str, dict[str, Any]]) -> str:
    """Return the table of the runs that are finished."""
    lines = [
        "| run | iterations | reward | success (%) | validation (%) | alarms (iteration) |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for name, one in by_run.items():
        reward, success = (ends(one["curve"][metric]) for metric in ("reward", "success"))
        percentages = [100 * share for share in one["validation"].values()]
        rang = ", ".join(f"`{alarm}` ({at})" for alarm, at in one["alarms"].items()) or "none"
        cells = [
            name,
            str(one["iterations"]),
            f"{reward[0]:.2f} → {reward[1]:.2f}",
            f"{100 * success[0]:.1f} → {100 * success[1]:.1f}",
            f"{percentages[0]:.1f} → {percentages[-1]:.1f}",
            rang,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first and the last iterations."""
    return fmean(values[:WINDOW]), fmean(values[-WINDOW:])


def open_home(names: Sequence[str]) -> None:
    """Make the project of the runs: the recipes and what they begin with in this checkout."""
    needed = {RUNS[name].recipe for name in names}
    stages = {TINY: "cold_start", LEARNED: "reward_model"}
    for recipe, stage in [(recipe, stages[recipe]) for recipe in stages if recipe in needed]:
        stage_folder = ROOT / "models" / recipe / stage
        if not stage_folder.is_dir():
            raise SystemExit(
                f"{stage_folder} does not exist: run `dvc repro {stage}@{recipe}` first"
            )
    HOME.mkdir(parents=True, exist_ok=True)
    shutil.copytree(ROOT / "params", HOME / "params", dirs_exist_ok=True)
    for folder in ("data", "models"):
        if not (HOME / folder).exists():
            (HOME / folder).symlink_to(ROOT / folder)
    (HOME / "own").mkdir(exist_ok=True)
    (HOME / "own" / "brevity.py").write_text(BREVITY)


def main() -> None:
    """Make the runs that are not finished, and print the table of all."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spoilt_runs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of {', '.join(RUNS)}; else all")
    names = parser.parse_args().runs or [*RUNS]
    if unknown := [name for name in names if name not in RUNS]:
        parser.error(f"no run {unknown[0]}: choose of {', '.join(RUNS)}")
    open_home(names)
    with chdir(HOME):
        for name in names:
            file = Path(f"{name}.json")
            with files.locked(Path(f"{name}.lock")):  # several calls may make runs side by side
                if not file.exists():
                    file.write_text(json.dumps(measure(name, RUNS[name]), indent=1) + "\n")
        result_files = {name: Path(f"{name}.json") for name in RUNS}
        print(table({n: json.loads(f.read_text()) for n, f in result_files.items() if f.exists()}))


if __name__ == "__main__":
    main()

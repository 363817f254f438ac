"""Training of the reward model as a sub-step: what it learns from, what a kill leaves, what it
reports; and its estimates as a part of the reward."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tasks.estimate import EstimateInputs, estimate
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.policy import outcome_model, published_model
from tasks.reward_model import (
    LabelInputs,
    RewardModelInputs,
    labelled_questions,
    load_buffer,
    reward_model,
)
from tasks.trees.labels import Labels
from tasks.trees.tables import load_questions, read_rows, save_questions, save_trees, write_table
from tasks.trees.tree import Question
from tests.sections import MACHINE, REWARD_MODEL
from tests.trees import random_tree

ROOT = Path(__file__).parents[2]
STEP = SubStep("toy", "reward_model", 0, 5)
LABELS = Labels(seed=1, share=0.8, held_out=0.6)
SETTINGS = REWARD_MODEL.model_copy(
    update={"labels": 0.8, "held_out": 0.6, "questions": 30, "micro_batch_tokens": 500}
    | {"learning_rate": 3e-3, "warmup_steps": 2, "weight_decay": 0.01, "gradient_clip": 1.0}
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome_model.SCORING.drop()
    return tmp_path


def is_success(tree, leaf):
    return bool(tree.nodes[tree.leaves[leaf]].tokens[-1] % 2 == 0)


def scored(name, seeds=range(40), success=is_success):
    """Trees and the table of their rewards, on the disk."""
    trees = [random_tree(seed, leaves=6, name=f"q{seed}") for seed in seeds]
    save_trees(trees, Path(name))
    rows = [
        {"question": tree.question.id, "leaf": leaf, "success": success(tree, leaf)}
        for tree in trees
        for leaf in range(len(tree.leaves))
    ]
    write_table(pa.Table.from_pylist(rows), Path(f"{name}.parquet"))
    return Artifact.at(Path(name)), Artifact.at(Path(f"{name}.parquet"))


def train(initial, *batches, before=None, settings=SETTINGS, step=STEP, labels=LABELS, **watch):
    inputs = RewardModelInputs(
        policy=Artifact.at(initial),
        before=before,
        trees=[trees for trees, _ in batches],
        rewards=[rewards for _, rewards in batches],
        first_batches=1,
        labels=labels,
        settings=settings,
        steps=settings.steps,
        machine=MACHINE,
    )
    return reward_model(step, inputs, **watch)


def model_of(record):
    return artifacts.output(record, "model")


# ---------------------------------------------------------------- what it learns from


def test_only_questions_with_labels_are_chosen_and_in_their_order(folder):
    questions = [Question(f"q{number}", "toy", "?", ("1",)) for number in range(50)]
    save_questions(questions, Path("train.parquet"))
    inputs = LabelInputs(Artifact.at(Path("train.parquet")), LABELS, 20)
    made = labelled_questions(STEP, inputs)
    chosen = load_questions(Path(artifacts.output(made, "questions").path))
    labelled = [question.id for question in questions if LABELS.role(question.id)]
    assert [question.id for question in chosen] == made["questions"] == labelled[:20]
    none = Labels(seed=1, share=1e-9, held_out=0.5)
    with pytest.raises(ValueError, match=r"none of the 50 .* raise reward_model\.labels"):
        labelled_questions(STEP, replace(inputs, labels=none))


def test_trajectories_without_labels_are_not_read(folder):
    first, second = scored("first", range(20)), scored("second", range(10, 40))
    buffer = load_buffer([first[0], second[0]], [first[1], second[1]], LABELS, 1)
    for role, examples in buffer.examples.items():
        assert examples
        for one in examples:
            tree = buffer.trees[one.tree]
            assert tree.question.id == one.question
            assert LABELS.role(one.question) == role
            assert one.success == is_success(tree, one.leaf)
    both = [tree.question.id for tree in buffer.trees]
    assert both == [f"q{n}" for n in [*range(20), *range(10, 40)] if LABELS.role(f"q{n}")]


def test_held_out_questions_do_not_train(initial, folder):
    """Their labels may all be turned around: weights stay, and what judges them does not."""

    def turned(tree, leaf):
        return is_success(tree, leaf) == (LABELS.role(tree.question.id) == "train")

    one, other = train(initial, scored("one")), train(initial, scored("other", success=turned))
    weights = [
        Path(model_of(record).path, outcome_model.BACKBONE, "model.safetensors").read_bytes()
        for record in (one, other)
    ]
    assert weights[0] == weights[1]
    assert one["metrics"]["auc"] == pytest.approx(1 - other["metrics"]["auc"])


def test_a_first_model_needs_both_kinds_of_trajectories(initial, folder):
    batch = scored("equal", success=lambda tree, leaf: False)
    with pytest.raises(ValueError, match=r"have the same label\. Raise reward_model"):
        train(initial, batch)
    pairs = SETTINGS.model_copy(update={"loss": "pairs"})
    apart = scored("apart", success=lambda tree, leaf: tree.question.id < "q3")
    with pytest.raises(ValueError, match="no question has trajectories with different labels"):
        train(initial, apart, settings=pairs)


def test_a_later_model_stays_where_nothing_can_be_learned(initial, folder):
    first = train(initial, scored("trees"))
    made = train(
        initial,
        scored("equal", success=lambda tree, leaf: True),
        before=model_of(first),
        step=replace(STEP, iteration=3),
    )
    assert model_of(made).digest == model_of(first).digest
    assert (made["metrics"]["steps"], made["metrics"]["calibrated"]) == (0, 0)
    assert "auc" not in made["metrics"]


# ---------------------------------------------------------------- what it reports


def test_it_tells_new_trajectories_apart_and_is_calibrated(initial, folder):
    """The last token decides; it learns that from six of ten questions."""
    batch = scored("trees", range(120))
    settings = SETTINGS.model_copy(update={"steps": 80, "batch": 32, "save_every": 80})
    metrics = (made := train(initial, batch, settings=settings))["metrics"]
    assert metrics["auc"] > 0.7
    assert metrics["calibrated"] == 1
    assert metrics["calibration_error_after"] <= metrics["calibration_error_before"]
    roles = [f"trajectories_{role}" for role in ("train", "calibrate", "judge")]
    labelled = sum(LABELS.role(f"q{number}") is not None for number in range(120))
    assert sum(metrics[role] for role in roles) == 6 * labelled
    assert metrics["buffer_mebibytes"] == pytest.approx(artifacts.size(Path("trees")) / 2**20)
    counts = [row["count"] for row in made["reliability"]["after"]]
    assert sum(counts) == metrics["trajectories_judge"]
    assert [point["step"] for point in made["curve"]] == list(range(1, 81))


# ---------------------------------------------------------------- kills

KILLED = """
import os, signal, sys
from pathlib import Path
os.chdir(sys.argv[2])
from tests.tasks import test_reward_model as tests
from tasks.policy.machine import use_machine
use_machine(tests.MACHINE)
batch = tests.Artifact.at(Path("trees")), tests.Artifact.at(Path("trees.parquet"))

def advance(done, shown):
    if done == 5:
        os.kill(os.getpid(), signal.SIGKILL)

tests.train(Path(sys.argv[1]), batch, advance=advance)
"""


@pytest.mark.kills
def test_a_killed_training_goes_on_and_ends_as_an_unbroken_one(
    initial, folder, tmp_path_factory, monkeypatch
):
    batch = scored("trees")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED, str(initial), str(folder)]
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (scratch,) = artifacts.ROOT.glob("toy/reward_model/.*.scratch")
    assert sorted(path.name for path in scratch.iterdir()) == ["checkpoint-2", "checkpoint-4"]

    steps = []
    made = train(initial, batch, advance=lambda done, shown: steps.append(done))
    assert steps == [5, 6], "it goes on at its newest checkpoint"
    assert not list(artifacts.ROOT.glob("toy/reward_model/.*"))
    monkeypatch.chdir(tmp_path_factory.mktemp("unbroken"))
    unbroken = train(initial, scored("trees"))
    assert model_of(made).digest == model_of(unbroken).digest
    assert made["metrics"] == unbroken["metrics"]
    assert made["curve"] == unbroken["curve"]


# ---------------------------------------------------------------- estimates


def test_estimates_are_calibrated_probabilities_of_each_leaf(initial, folder):
    batch = scored("trees")
    model = model_of(train(initial, batch))
    made = estimate(STEP, EstimateInputs(model, batch[0], 100, MACHINE))
    rows = read_rows(Path(artifacts.output(made, "estimates").path))
    assert [(row["question"], row["leaf"]) for row in rows] == [
        (f"q{number}", leaf) for number in range(40) for leaf in range(6)
    ]
    values = np.array([row["estimate"] for row in rows])
    assert ((values > 0) & (values < 1)).all()
    saved = json.loads(Path(model.path, outcome_model.CALIBRATION).read_text())
    assert outcome_model.SCORING.model.calibration.model_dump() == saved
    again = estimate(replace(STEP, iteration=1), EstimateInputs(model, batch[0], 10_000, MACHINE))
    others = [row["estimate"] for row in read_rows(Path(artifacts.output(again, "estimates").path))]
    np.testing.assert_allclose(values, others, atol=1e-5)


def test_the_stages_folder_holds_a_model_or_says_that_there_is_none(initial, folder):
    place = Path("models/toy/reward_model")
    with pytest.raises(ValueError, match="run the stage that makes it, reward_model, first"):
        published_model.published(place)
    published_model.publish(place, None)
    assert published_model.published(place) is None
    trees, rewards = scored("trees")
    model = model_of(train(initial, (trees, rewards)))
    published_model.publish(place, published_model.PublishedRewardModel(model, trees, rewards))
    found = published_model.published(place)
    assert [found.model.digest, found.trees.digest, found.rewards.digest] == [
        model.digest,
        trees.digest,
        rewards.digest,
    ]
    published_model.publish(place, None)
    assert published_model.published(place) is None

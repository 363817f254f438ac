"""reward_model: a model learns which trajectories succeed, from those that have labels."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from params.schema.base import Machine
from params.schema.reward_model import RewardModel
from tasks.learning import outcome
from tasks.learning.progress import Advance, no_advance
from tasks.learning.replay import Example, ScoredTrees, draw, mebibytes
from tasks.ledger import artifacts, substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.policy import checkpoint, outcome_model
from tasks.policy.machine import use_machine
from tasks.policy.outcome_model import OutcomeModel
from tasks.trees import calibration
from tasks.trees.calibration import Calibration
from tasks.trees.labels import Labels, Role
from tasks.trees.outcomes import INFRASTRUCTURE
from tasks.trees.tables import StoredQuestions, load_trees, read_rows, save_questions
from tasks.trees.tree import Tree, masked_leaves

POINTS = 50  # of the curve
CHECKPOINTS = 2  # that are kept
LOSSES = "losses.json"  # in a checkpoint: those of its steps
ENOUGH = 100  # trajectories of the newest iterations, with which these alone calibrate the model
MODEL, OPTIMIZER = "model", "optimizer"  # folders of a checkpoint


@dataclass(frozen=True)
class LabelInputs:
    """Which questions the cold start answers for the first training."""

    questions: Artifact  # of the training split
    labels: Labels
    most_questions: int


@substeps.recorded
def labelled_questions(step: SubStep, inputs: LabelInputs) -> Record:
    """Choose the first questions with labels; artifact ``questions``.

    Raises ValueError where there is none.
    """
    began = time.perf_counter()
    every = StoredQuestions(Path(inputs.questions.path))
    questions = [one for one in every if inputs.labels.role(one.id)][: inputs.most_questions]
    if not questions:
        raise ValueError(
            f"none of the {len(every)} training questions has a label: raise reward_model.labels, "
            f"which is {inputs.labels.share:g}"
        )
    save_questions(questions, step.out / "questions.parquet")
    return {
        "metrics": {"labelled_questions": len(questions)},
        "seconds": {"labels": time.perf_counter() - began},
        "questions": [one.id for one in questions],
    }


@dataclass(frozen=True)
class RewardModelInputs:
    """What decides a reward model: where it begins, and what it learns from.

    ``trees`` and ``rewards`` are those of the replay buffer, the oldest first; the first model has
    learned from ``first_batches`` of them.
    """

    policy: Artifact  # whose backbone a new model has
    before: Artifact | None  # the model that goes on learning; None: it is new
    trees: list[Artifact]
    rewards: list[Artifact]
    first_batches: int
    labels: Labels
    settings: RewardModel
    steps: int  # optimizer steps
    machine: Machine


@dataclass(frozen=True)
class LabelledTrajectories:
    """The trajectories with labels, in memory."""

    trees: list[Tree]
    examples: Mapping[Role, Sequence[Example]]


@substeps.recorded
def reward_model(
    step: SubStep, inputs: RewardModelInputs, *, advance: Advance = no_advance
) -> Record:
    """Train a reward model, calibrate it and judge it on questions that it has not seen.

    Artifact ``model``. A killed training goes on at its newest checkpoint. A buffer without both
    kinds of trajectories leaves an earlier model as it is; without one, ValueError is raised.
    ``advance`` is called with the steps done so far and the newest loss.
    """
    began = time.perf_counter()
    use_machine(inputs.machine)
    outcome_model.SCORING.drop()  # frees its memory before another one is loaded
    buffer = load_buffer(inputs.trees, inputs.rewards, inputs.labels, inputs.first_batches)
    model, losses = _trained(step, inputs, buffer, advance)
    report = _calibrated(model, inputs, buffer)
    outcome_model.save(model, step.out / MODEL)
    return {
        "metrics": {
            "steps": len(losses),
            **({"mean_loss": math.fsum(losses) / len(losses)} if losses else {}),
            **report["metrics"],
            **_sizes(inputs, buffer),
        },
        "curve": _curve(losses),
        "reliability": report["reliability"],
        "seconds": {"reward_model": time.perf_counter() - began},
        "questions": sorted({one.question for some in buffer.examples.values() for one in some}),
    }


def load_buffer(
    trees: Sequence[Artifact], rewards: Sequence[Artifact], labels: Labels, first_batches: int
) -> LabelledTrajectories:
    """Read the trajectories with labels of some trees and their rewards.

    A trajectory's label is whether it is a success: the highest score in a sound format. One that
    the infrastructure has ended has none.
    """
    labelled_trees: list[Tree] = []
    examples: dict[Role, list[Example]] = {"train": [], "calibrate": [], "judge": []}
    for number, (of_trees, of_rewards) in enumerate(zip(trees, rewards, strict=True)):
        places, failed = {}, set()
        for tree in load_trees(Path(of_trees.path)):
            if labels.role(tree.question.id):
                places[tree.question.id] = len(labelled_trees)
                labelled_trees.append(tree)
                of_tree = enumerate(masked_leaves(tree, INFRASTRUCTURE))
                failed |= {(tree.question.id, leaf) for leaf, masked in of_tree if masked}
        for row in read_rows(Path(of_rewards.path)):
            role = labels.role(name := row["question"])
            if role and (name, row["leaf"]) not in failed:
                of_leaf = (places[name], row["leaf"], name, row["success"])
                examples[role].append(Example(*of_leaf, newest=number >= first_batches))
    return LabelledTrajectories(labelled_trees, examples)


# ---------------------------------------------------------------- training


def _trained(
    step: SubStep, inputs: RewardModelInputs, buffer: LabelledTrajectories, advance: Advance
) -> tuple[OutcomeModel, list[float]]:
    """Return the model after all its steps, and the loss of each."""
    settings, scratch = inputs.settings, step.ledger.scratch(step)
    newest = substeps.newest_checkpoint(scratch)
    model = _begun(inputs, newest)
    examples = buffer.examples["train"]
    if (fault := _fault(settings, examples)) and not newest:
        if inputs.before is None:
            raise ValueError(
                f"the reward model has nothing to learn from: {fault}. Raise "
                "reward_model.labels or reward_model.questions, or sample with a higher temperature"
            )
        return model, []
    training = outcome.begin(model, settings, inputs.machine)
    losses: list[float] = []
    if newest:
        checkpoint.load_state(training.optimizer, newest / OPTIMIZER)
        losses = json.loads((newest / LOSSES).read_text())
    key = (step.seed, step.iteration)
    for end in _stops(settings, inputs.steps, len(losses)):
        numbers = range(len(losses), end)
        losses += outcome.train(training, buffer.trees, examples, numbers, key)
        advance(end, {"loss": losses[-1]})
        if end % settings.save_every == 0 and end < inputs.steps:
            _save(step, training, losses, scratch / f"checkpoint-{end}")
    return model, losses


def _begun(inputs: RewardModelInputs, newest: Path | None) -> OutcomeModel:
    """Return the model of a checkpoint, the one before, or a new one."""
    if newest:
        return outcome_model.load(newest / MODEL, inputs.machine)
    if inputs.before:
        return outcome_model.load(Path(inputs.before.path), inputs.machine)
    return outcome_model.begin(Path(inputs.policy.path), inputs.machine)


def _fault(settings: RewardModel, examples: Sequence[Example]) -> str:
    """Return why nothing can be drawn from the examples, or ""."""
    try:
        draw(examples, settings.loss, settings.batch, [0])
    except ValueError as error:
        return str(error)
    return ""


def _stops(settings: RewardModel, steps: int, done: int) -> list[int]:
    """Return the numbers of steps at which training reports or writes a checkpoint."""
    every = max(1, steps // POINTS)
    stops = {*range(0, steps, every), *range(0, steps, settings.save_every), steps}
    return sorted(stop for stop in stops if stop > done)


def _save(
    step: SubStep, training: outcome.OutcomeLearner, losses: Sequence[float], folder: Path
) -> None:
    """Write a checkpoint, from which a killed training goes on."""
    artifacts.remove(folder)
    outcome_model.save(training.model, folder / MODEL)
    checkpoint.save_state(training.optimizer, folder / OPTIMIZER)
    (folder / LOSSES).write_text(json.dumps(losses))
    substeps.drop_old_checkpoints(folder.parent, CHECKPOINTS)
    step.ledger.seal(folder)


def _curve(losses: Sequence[float]) -> list[dict[str, float]]:
    """Return a point of every so many steps: the mean loss since the one before."""
    every = max(1, len(losses) // POINTS)
    return [
        {"step": end, "loss": math.fsum(losses[end - every : end]) / every}
        for end in range(every, len(losses) + 1, every)
    ]


# ---------------------------------------------------------------- calibration


@dataclass(frozen=True)
class HeldOut:
    """Trajectories of one role, with the model's logits: [N] each."""

    logits: NDArray[np.float64]
    labels: NDArray[np.bool_]
    newest: NDArray[np.bool_]  # of iterations, and not of the first training

    def of_newest(self) -> HeldOut:
        newest = self.newest
        return HeldOut(self.logits[newest], self.labels[newest], newest[newest])

    def auc(self) -> float | None:
        return calibration.auc(self.logits, self.labels)


def _calibrated(
    model: OutcomeModel, inputs: RewardModelInputs, buffer: LabelledTrajectories
) -> dict[str, Any]:
    """Calibrate the model in place, and judge it before and after.

    **Chosen**: trajectories of the newest iterations calibrate it where there are ENOUGH and they
    can decide it, for they show what the policy does now; else all do. Held-out questions that
    can't decide a calibration leave the one that the model has.
    """
    before = model.calibration
    fitted = _fitted(_held_out(model, inputs, buffer, "calibrate"))
    model.calibration = fitted or before
    judged = _held_out(model, inputs, buffer, "judge")
    newest = judged.of_newest()
    areas = {"auc": judged.auc(), "auc_newest": newest.auc()}
    metrics = {
        "temperature": model.calibration.temperature,
        "offset": model.calibration.offset,
        "calibrated": float(fitted is not None),
        **{name: area for name, area in areas.items() if area is not None},
    }
    reliability = {}
    if len(judged.labels):
        for name, judged_calibration in (("before", before), ("after", model.calibration)):
            probabilities = judged_calibration.probabilities(judged.logits)
            error = calibration.expected_calibration_error(probabilities, judged.labels)
            metrics[f"calibration_error_{name}"] = error
            reliability[name] = calibration.reliability(probabilities, judged.labels)
    if len(newest.labels):
        probabilities = model.calibration.probabilities(newest.logits)
        error = calibration.expected_calibration_error(probabilities, newest.labels)
        metrics["calibration_error_newest"] = error
    return {"metrics": metrics, "reliability": reliability}


def _held_out(
    model: OutcomeModel, inputs: RewardModelInputs, buffer: LabelledTrajectories, role: Role
) -> HeldOut:
    """Score the trajectories of a role."""
    examples, tokens = buffer.examples[role], inputs.settings.micro_batch_tokens
    leaves = [(one.tree, one.leaf) for one in examples]
    return HeldOut(
        outcome.logits_of(model, buffer.trees, leaves, tokens, inputs.machine),
        np.array([one.success for one in examples], bool),
        np.array([one.newest for one in examples], bool),
    )


def _fitted(scored: HeldOut) -> Calibration | None:
    newest = scored.of_newest()
    fitted = None
    if len(newest.labels) >= ENOUGH:
        fitted = calibration.fit(newest.logits, newest.labels)
    return fitted or calibration.fit(scored.logits, scored.labels)


def _sizes(inputs: RewardModelInputs, buffer: LabelledTrajectories) -> dict[str, float]:
    """Return what the buffer holds: trajectories by role, successes, batches, and size on disk."""
    every = [one for some in buffer.examples.values() for one in some]
    counts = {f"trajectories_{role}": float(len(some)) for role, some in buffer.examples.items()}
    return {
        **counts,
        "successes": sum(one.success for one in every) / max(1, len(every)),
        "buffer_batches": float(len(inputs.trees)),
        "buffer_mebibytes": mebibytes(list(map(ScoredTrees, inputs.trees, inputs.rewards))),
    }

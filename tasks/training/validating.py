"""Ask policies the validation questions during training, and choose the one that is published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from params.run_folders import RunFolders
from params.schema.recipe import Recipe
from tasks.environments.contract import OpenEnvironment
from tasks.evaluation.exam import Exam, answer
from tasks.ledger.artifacts import Artifact, Record
from tasks.rewards.scoring import Reader
from tasks.training.iteration import Iteration, validated_in
from tasks.training.setup import Training
from tasks.trees import validation
from tasks.trees.validation import Validated


def exam_of(
    recipe: Recipe, name: str, corpus: Artifact, environment: OpenEnvironment, reader: Reader
) -> Exam | None:
    """Return what policies are asked during training; None where the recipe has no validation."""
    section = recipe.reinforce.validation
    if section is None:
        return None
    return Exam(
        recipe=recipe,
        questions=Artifact.at(RunFolders(name).split("validation")),
        panel=Artifact.at(RunFolders(name).panel("validation")),
        corpus=corpus,
        environment=environment,
        reader=reader,
        size=section.questions,
        samples=section.samples,
        evaluation=False,
    )


def is_due(training: Training, iterations: int) -> bool:
    """Return whether a policy that has learned from so many iterations is asked in any case."""
    section = training.recipe.reinforce.validation
    return section is not None and iterations % section.every == 0


def validate(training: Training, policy: Artifact, iterations: int) -> list[Record]:
    """Ask a policy that has learned from so many iterations the validation questions.

    Returns the records of its rollout and reward; none where the training has no exam.
    """
    if training.exam is None:
        return []
    start = training.start
    step = replace(start, stage=f"{start.stage}/validation", iteration=iterations)
    return answer(training.exam, step, policy)


def best_so_far(
    training: Training, validated: Sequence[tuple[Artifact, Validated]]
) -> list[Artifact]:
    """Return the best policy by validation if that is what the recipe publishes, else none."""
    section = training.recipe.reinforce.validation
    if not validated or section is None or section.publish == "last":
        return []
    best = validation.best([one for _, one in validated], training.recipe.verdict.measure)
    return [policy for policy, one in validated if one is best]


def published(training: Training, iterations: Sequence[Iteration]) -> int:
    """Return the iteration whose policy is published: the last, or the best by validation."""
    section = training.recipe.reinforce.validation
    if training.exam is None or section is None or section.publish == "last":
        return len(iterations) - 1
    return validation.best(validated_in(iterations), training.recipe.verdict.measure).iterations - 1

"""What a training run is made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from params.run_folders import RunFolders
from params.schema.algorithms import Algorithm
from params.schema.recipe import Recipe
from params.schema.teacher import ServerTeacher
from tasks import recipes
from tasks.environments.contract import OpenEnvironment
from tasks.evaluation.exam import Exam
from tasks.learning.learner_group import HERE, Learners
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.policy import published_model
from tasks.policy.published_model import PublishedRewardModel
from tasks.rewards import judging
from tasks.rewards.scoring import Reader


@dataclass(frozen=True)
class Training:
    """What a training run is made of; ``start`` is its first iteration's step."""

    start: SubStep
    recipe: Recipe
    algorithm: Algorithm
    policy: Artifact
    questions: Artifact
    corpus: Artifact
    environment: OpenEnvironment
    reader: Reader  # of the agent's turns: the dialect
    exam: Exam | None = None  # the validation questions; None: they are not asked
    learners: Learners = HERE  # where the policy learns
    reward_model: PublishedRewardModel | None = (
        None  # that training begins with; None: there is none
    )
    # whose probabilities are learned; None: there is none
    teacher: Artifact | ServerTeacher | None = None
    most_iterations: int | None = None  # None: as many as the recipe says

    @property
    def iterations(self) -> int:
        """Return the number of iterations, if nothing ends the training before."""
        return self.most_iterations or self.recipe.reinforce.iterations

    @cached_property
    def judged(self) -> dict[str, Any]:
        """Return what decides rewards and is not in the recipe; read from its files once."""
        return {
            "sources": recipes.reward_sources(self.recipe, Path("params")),
            **judging.inputs(self.recipe, Path("params"), evaluation=False),
            **(_labelled(self.recipe) if self.reward_model else {}),
        }


def _labelled(recipe: Recipe) -> dict[str, Any]:
    """Return which questions have labels, and whether others are scored, too."""
    assert recipe.reward_model, "a reward model has its section"
    only = recipe.reward_model.scored == "labelled"
    return {"labels": recipes.labels_of(recipe), "labelled_only": only}


def reward_model_of(recipe: Recipe, name: str) -> PublishedRewardModel | None:
    """Return the reward model that training begins with; None where the recipe has none.

    Raises ValueError where the stage reward_model has not made it.
    """
    if recipe.reward_model is None:
        return None
    folder, fault = RunFolders(name).reward_model, "it says that there is none"
    try:
        if reward_model := published_model.published(folder):
            return reward_model
    except ValueError as error:
        fault = str(error).partition(":")[0]
    raise ValueError(
        f"params/{name}.yaml has the section reward_model, and {folder} has no reward model "
        f"({fault}): run `dvc repro reward_model@{name}`"
    )

"""What is compared: variants of a recipe's training, each with the same budget."""

from __future__ import annotations

from dataclasses import dataclass

from params.schema.algorithms import Algorithm
from params.schema.recipe import Recipe
from params.schema.teacher import ServerTeacher
from tasks.comparison.budget import Budget
from tasks.environments.contract import OpenEnvironment
from tasks.evaluation.exam import Exam
from tasks.ledger.artifacts import Artifact
from tasks.policy.published_model import PublishedRewardModel
from tasks.rewards.scoring import Reader
from tasks.training.validating import exam_of


@dataclass(frozen=True)
class Variant:
    """One line of the table: the recipe with an algorithm and overrides."""

    name: str
    recipe: Recipe
    algorithm: Algorithm

    @property
    def steps(self) -> int:
        """Return the optimizer steps a batch."""
        section = self.recipe.reinforce.update
        return section.epochs * section.mini_batches


@dataclass(frozen=True)
class Comparison:
    """What all variants share, and the budget of each."""

    name: str  # of the recipe
    recipe: Recipe
    budget: Budget
    cold_start: Artifact
    questions: Artifact
    test: Artifact
    panel: Artifact  # of the held-out tasks
    corpus: Artifact
    environment: OpenEnvironment
    reader: Reader
    reward_model: PublishedRewardModel | None = None  # that each variant's training begins with
    teacher: Artifact | ServerTeacher | None = None  # of rows that have one

    def validation(self, variant: Variant) -> Exam | None:
        """Return what a variant's policies are asked during training; None for most variants."""
        return exam_of(variant.recipe, self.name, self.corpus, self.environment, self.reader)

    def held_out(self) -> Exam:
        """Return what every trained policy, and the cold start, is asked at the end."""
        return Exam(
            recipe=self.recipe,
            questions=self.test,
            panel=self.panel,
            corpus=self.corpus,
            environment=self.environment,
            reader=self.reader,
        )

"""Ask a policy the tasks of a panel and score its answers: evaluation, validation, comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from params.schema.algorithms import Marks
from params.schema.recipe import Recipe
from tasks import settings
from tasks.environments.contract import OpenEnvironment
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import Step
from tasks.reward import RewardInputs, reward
from tasks.rewards.scoring import Reader
from tasks.rollout import RolloutInputs, rollout


@dataclass(frozen=True)
class Exam:
    """What every policy is asked, and the environment of its answers."""

    recipe: Recipe
    questions: Artifact  # of the split
    panel: Artifact  # the tasks that are asked, in their order
    corpus: Artifact
    environment: OpenEnvironment
    reader: Reader  # of the agent's turns: the dialect
    first: int = 0  # place of the first task asked in the panel
    size: int | None = None  # most tasks that are asked; None: as many as an evaluation
    samples: int | None = None  # answers a task; None: as many as an evaluation


def answer(
    exam: Exam,
    step: Step,
    policy: Artifact,
    advance: Callable[[int], object] = lambda finished: None,
) -> list[Record]:
    """Let one policy do each task of the panel; return its rollout's and its reward's record.

    ``advance`` is called with the number of tasks finished since its last call.
    """
    recipe = exam.recipe
    inputs = RolloutInputs(
        policy=policy,
        questions=exam.questions,
        panel=exam.panel,
        size=exam.size or recipe.evaluate.questions,
        first=exam.first,
        attempt=0,
        branching="none",
        marks=Marks(kind="none"),
        budget=recipe.evaluation_budget(exam.samples),
        top_p=recipe.evaluate.top_p,
        agent=settings.agent_of(recipe),
        corpus=exam.corpus,
    )
    rolled_out = rollout(step, inputs, environment=exam.environment, advance=advance)
    scoring = RewardInputs(
        trees=artifacts.output(rolled_out, "trees"),
        settings=recipe.reinforce.reward,
        overlong=None,
        response_tokens=recipe.dialogue.response_tokens,
        sources=settings.reward_sources(recipe, Path("params")),
        dialect=recipe.dialect,
        tools=tuple(spec.name for spec in exam.environment.specs),
    )
    return [rolled_out, reward(step, scoring, reader=exam.reader)]


def rewards_of(answered: Sequence[Record]) -> Artifact:
    """Return the table of scored answers among the records of ``answer``."""
    return artifacts.output(answered[-1], "rewards")

"""Ask a policy the tasks of a panel and score its answers: evaluation, validation, comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from params.schema.recipe import Recipe
from tasks import recipes
from tasks.engines.chat import open_policy
from tasks.environments.contract import OpenEnvironment
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.reward import RewardInputs, reward
from tasks.rewards import judging, reward_parts
from tasks.rewards.judging import OpenPolicy
from tasks.rewards.scoring import Reader
from tasks.rollout import RolloutInputs, rollout, told_of
from tasks.trees.outcomes import INFRASTRUCTURE


@dataclass(frozen=True)
class Exam:
    """What every policy is asked, and the environment of its answers."""

    recipe: Recipe
    questions: Artifact  # of the split
    panel: Artifact | None  # the tasks that are asked, in their order; None: they are drawn
    corpus: Artifact
    environment: OpenEnvironment
    reader: Reader  # of the agent's turns: the dialect
    first: int = 0  # place of the first task asked in the panel
    size: int | None = None  # most tasks that are asked; None: as many as an evaluation
    samples: int | None = None  # answers a task; None: as many as an evaluation
    evaluation: bool = True  # whether answers are scored by the protocol of the evaluation
    training: bool = False  # whether they are sampled as in training, at its temperature


def answer(
    exam: Exam,
    step: SubStep,
    policy: Artifact,
    advance: Callable[[int], object] = lambda finished: None,
) -> list[Record]:
    """Let one policy do each task of the panel; return its rollout's and its reward's record.

    Where the infrastructure fails, the task is asked once more; if it fails again, it counts as
    wrong.

    ``advance`` is called with the number of tasks finished since its last call.
    """
    recipe = exam.recipe
    budget = recipe.training_budget() if exam.training else recipe.evaluation_budget(exam.samples)
    inputs = RolloutInputs(
        policy=policy,
        questions=exam.questions,
        panel=exam.panel,
        size=exam.size or recipe.evaluate.questions,
        first=exam.first,
        budget=budget,
        top_p=1.0 if exam.training else recipe.evaluate.top_p,
        agent=recipes.agent_of(recipe),
        corpus=exam.corpus,
        again=INFRASTRUCTURE,
        told=told_of(exam.environment),
    )
    rolled_out = rollout(step, inputs, environment=exam.environment, advance=advance)
    scoring = RewardInputs(
        trees=artifacts.output(rolled_out, "trees"),
        settings=reward_parts.without_model(recipe.reinforce.reward),
        overlong=None,
        response_tokens=recipe.dialogue.response_tokens,
        sources=recipes.reward_sources(recipe, Path("params")),
        dialect=recipe.dialect,
        tools=tuple(spec.name for spec in exam.environment.specs),
        **judging.inputs(recipe, Path("params"), exam.evaluation),
    )
    return [
        rolled_out,
        reward(step, scoring, reader=exam.reader, open_policy=judges_of(recipe)),
    ]


def judges_of(recipe: Recipe) -> OpenPolicy:
    """Return what opens a policy of this machine as a judge, sampled by the recipe's engine."""
    agent, rows = recipes.agent_of(recipe), recipe.reinforce.rollout.rows
    return lambda folder: open_policy(folder, agent, rows, folder.as_posix())


def rewards_of(answered: Sequence[Record]) -> Artifact:
    """Return the table of scored answers among the records of ``answer``."""
    return artifacts.output(answered[-1], "rewards")


def verdicts_of(answered: Sequence[Record]) -> Path:
    """Return where the table of a judge's verdicts is; it exists where a judge was asked."""
    return Path(rewards_of(answered).path).with_name(judging.VERDICTS)

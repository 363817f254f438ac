"""Measure one variant and seed: train until the budget is spent, then ask the held-out questions.

What a result depends on stands here and in what these functions call; ``Common.key`` digests it
function by function, so that an edit of a command, a table or a figure leaves results as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from flows.comparisons.variants import Variant
from flows.reinforce import (
    Iteration,
    Training,
    exam_of,
    is_asked,
    policy_of,
    published,
    train,
    validate,
)
from flows.runs import git
from flows.tracking import comparison_report, figure_data
from flows.tracking.comparison_tables import SPENT
from flows.tracking.progress import Progress
from flows.tracking.reinforce_report import sum_seconds, training_curve
from params.schema.recipe import Recipe
from tasks import settings
from tasks.environments.contract import OpenEnvironment
from tasks.evaluate import by_question
from tasks.exam import Exam, answer, rewards_of
from tasks.ledger import keys
from tasks.ledger.artifacts import Artifact
from tasks.ledger.functions import function_digests
from tasks.ledger.substeps import Ledger, Step
from tasks.policy.published_model import Published
from tasks.rewards import judging, parts
from tasks.rewards.scoring import Reader
from tasks.trees import panels
from tasks.trees.metrics import together
from tasks.trees.tables import load_questions, read_rows

NOT_DECIDING = {
    "algorithm",
    "keep",
    "trace_every",
    "trace_questions",
    "stop_on",
}  # of ``reinforce``
LONGEST = 20  # times the recipe's iterations, where a variant hardly spends the budget
# whose source decides a result
VERBS = ("rollout", "estimate", "reward", "advantage", "update", "reward_model", "exam")
REPORTING = ("flows/host", "flows/runs", "flows/tracking", "flows/workers")  # decide none


@dataclass(frozen=True)
class Budget:
    """What each variant may spend in training: an amount of one of SPENT."""

    kind: str
    amount: float

    @staticmethod
    def parse(text: str) -> Budget:
        """Read ``kind=amount``. Raises ValueError."""
        kind, _, amount = text.partition("=")
        try:
            budget = Budget(kind, float(amount))
        except ValueError:
            budget = Budget(kind, 0.0)
        if kind not in SPENT or not 0 < budget.amount < float("inf"):
            given = f"--budget {text}" if text else "--budget is missing"
            raise ValueError(f"{given}: write kind=amount, with a kind of {list(SPENT)}")
        return budget


@dataclass(frozen=True)
class Common:
    """What all variants share, and the budget of each."""

    name: str
    recipe: Recipe
    budget: Budget
    cold_start: Artifact
    questions: Artifact
    test: Artifact
    panel: Artifact  # of the held-out tasks
    corpus: Artifact
    environment: OpenEnvironment
    reader: Reader
    ledger: Ledger
    reward_model: Published | None = None  # that each variant's training begins with

    def step(self, variant: str, seed: int) -> Step:
        """Return the first step of a variant's training."""
        stage = f"compare/{comparison_report.slug(variant)}/seed-{seed}"
        return Step(self.name, stage, 0, seed, self.ledger)

    def exam(self, variant: Variant) -> Exam | None:
        """Return what a variant's policies are asked during training; None for most variants."""
        shared = (self.name, self.corpus, self.environment, self.reader)
        return exam_of(variant.recipe, *shared)

    def key(self, variant: Variant | None, seed: int) -> str:
        """Return the key of a result: everything that decides it, the sources included."""
        inputs: dict[str, Any] = {
            "seed": seed,
            "artifacts": [self.cold_start, self.questions, self.test, self.panel, self.corpus],
            "exam": [
                *(self.recipe.machine, self.recipe.engine, settings.agent_of(self.recipe)),
                self.recipe.evaluation_budget(),
                parts.without_model(self.recipe.reinforce.reward),
                self.recipe.evaluate.model_dump(exclude={"bootstrap", "panel"}),
                settings.reward_sources(self.recipe, Path("params")),
                judging.inputs(self.recipe, Path("params"), evaluation=True),
            ],
        }
        if variant:
            inputs |= {
                "algorithm": variant.algorithm,
                "budget": f"{self.budget.kind}={self.budget.amount}",
                "training": variant.recipe.reinforce.model_dump(mode="json", exclude=NOT_DECIDING),
                "engine": [variant.recipe.engine, variant.recipe.lora],
            }
            if made := self.reward_model:
                learned = [made.model, made.trees, made.rewards]
                inputs["reward_model"] = [variant.recipe.reward_model, *learned]
            if exam := self.exam(variant):
                inputs["validation"] = [exam.questions, exam.panel, self.recipe.verdict.measure]
        sources = {
            f"source of {name}": keys.source_digest(keys.PROJECT / "tasks" / f"{name}.py")
            for name in VERBS
        }
        code = function_digests(Path(__file__), measured.__name__, "flows", REPORTING)
        inputs["code"] = code
        return keys.key_of({name: keys.identity(value) for name, value in inputs.items()} | sources)


def measured(common: Common, variant: Variant | None, step: Step) -> dict[str, Any]:
    """Train a variant and ask it the held-out questions; without one, ask the cold start."""
    recipe = variant.recipe if variant else common.recipe
    policy, trained = common.cold_start, {}
    if variant:
        made = (step, recipe, variant.algorithm, policy, common.questions, common.corpus)
        done, spent = train_until(
            training := Training(
                *made,
                common.environment,
                common.reader,
                common.exam(variant),
                reward_model=common.reward_model,
            ),
            common.budget,
            variant.name,
        )
        chosen = published(training, done)
        policy = policy_of(done[chosen])
        trained = {
            "algorithm": variant.algorithm.model_dump(mode="json", by_alias=True),
            "steps_a_batch": variant.steps,
            "iterations": len(done),
            **({"published_iteration": chosen} if training.exam else {}),
            "spent": spent,
            "trained_tokens": sum(one["update"][0]["metrics"]["trained_tokens"] for one in done),
            "curve": curve_of(done),
            **figure_data.of_training(done, variant.algorithm, common.reader),
        }
    asked = replace(step, stage=f"{step.stage}/evaluate")
    held_out = (common.test, common.panel, common.corpus)
    exam = Exam(common.recipe, *held_out, common.environment, common.reader)
    whole = panels.load(Path(common.panel.path))
    rows = read_rows(Path(rewards_of(answer(exam, asked, policy)).path))
    answers = sorted(by_question(rows).items())  # paired by question
    kinds = {one.id: one.kind for one in load_questions(Path(common.test.path))}
    right = [_mean(row["success"] for row in own) for _, own in answers]
    return {
        **trained,
        "commit": git.revision().commit,
        "uncommitted": git.revision().dirty,
        "panel": panels.summary(whole, exam.first, common.recipe.evaluate.questions),
        "success": _mean(right),
        "kinds": [kinds[question] for question, _ in answers],
        "right": right,  # of each question, the share of its answers
        "scores": [_mean(row["score"] * row["sound"] for row in own) for _, own in answers],
        **figure_data.of_answers([own for _, own in answers]),
    }


def _mean(values: Iterable[float]) -> float:
    every = list(values)
    return sum(every) / len(every)


def train_until(
    training: Training, budget: Budget, name: str
) -> tuple[list[Iteration], dict[str, float]]:
    """Train until an iteration has spent the budget; return the iterations and what they spent.

    A variant that hardly spends it ends after LONGEST times the recipe's iterations.
    """
    done: list[Iteration] = []
    total = dict.fromkeys(SPENT, 0.0)
    most = LONGEST * training.recipe.reinforce.iterations
    progress = Progress(f"{name}, seed {training.start.seed}", int(budget.amount))
    with closing(train(training, most)) as iterations:  # ends what was sampled ahead
        for iteration in iterations:
            done.append(iteration)
            total = {kind: total[kind] + amount for kind, amount in spent(iteration).items()}
            now = {"success": iteration["reward"][0]["metrics"]["success"]}
            progress.reach(int(min(total[budget.kind], budget.amount)), now)
            if total[budget.kind] >= budget.amount:
                break
    progress.close()
    if not is_asked(training, len(done)) and len(done) < most:  # the last one is asked, too
        last = validate(training, policy_of(done[-1]), len(done))
        done[-1] = {**done[-1], "validation": [*done[-1].get("validation", ()), *last]}
    return done, total


def curve_of(done: Sequence[Iteration]) -> dict[str, list[float]]:
    """Return the training curve: by measure, and by kind of what was spent so far, a list each."""
    each = [spent(iteration) for iteration in done]
    columns = {kind: list(accumulate(one[kind] for one in each)) for kind in SPENT}
    return {
        name: [float(f"{value:.6g}") for value in values]
        for name, values in (columns | training_curve(done)).items()
    }


def spent(iteration: Iteration) -> dict[str, float]:
    """Return what an iteration has spent of each kind; what branches share counts once."""
    counted = together([record["metrics"] for record in iteration["rollout"]])
    return {
        kind: sum(sum_seconds(iteration).values()) if kind == "seconds" else counted[kind]
        for kind in SPENT
    }

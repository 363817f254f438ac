"""Measure one variant and seed: train until the budget is spent, then ask the held-out questions.

What a result depends on stands here and in what this file imports: ``key_of`` digests it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from tasks import recipes
from tasks.comparison import figure_data
from tasks.comparison.budget import SPENT, Budget
from tasks.comparison.comparison import Comparison, Variant
from tasks.evaluate import by_question
from tasks.evaluation.exam import Exam, answer, rewards_of
from tasks.ledger import keys
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.rewards import judging, reward_parts
from tasks.training.curves import sum_seconds, training_curve
from tasks.training.iteration import Iteration, policy_of
from tasks.training.loop import train
from tasks.training.setup import Training
from tasks.training.validating import is_due, published, validate
from tasks.trees import panels
from tasks.trees.metrics import together
from tasks.trees.tables import load_questions, read_rows

NOT_DECIDING = {  # of ``reinforce``
    *("algorithm", "keep", "trace_every", "trace_questions", "stop_on"),
}
LONGEST = 20  # times the recipe's iterations, where a variant hardly spends the budget

Spent = dict[str, float]  # kind of SPENT -> amount
Report = Callable[[Iteration, Spent], object]  # of an iteration, with all that was spent so far


def key_of(comparison: Comparison, variant: Variant | None, seed: int) -> str:
    """Return the key of a result: everything that decides it, the sources included."""
    recipe = comparison.recipe
    shared = ("cold_start", "questions", "test", "panel", "corpus")
    inputs: dict[str, Any] = {
        "seed": seed,
        "artifacts": [getattr(comparison, name) for name in shared],
        "exam": [
            *(recipe.machine, recipe.engine, recipes.agent_of(recipe)),
            recipe.evaluation_budget(),
            reward_parts.without_model(recipe.reinforce.reward),
            recipe.evaluate.model_dump(exclude={"bootstrap", "panel"}),
            recipes.reward_sources(recipe, Path("params")),
            judging.inputs(recipe, Path("params"), evaluation=True),
        ],
    }
    if variant:
        inputs |= _inputs_of_training(comparison, variant)
    source = {"source": keys.source_digest(Path(__file__))}
    return keys.key_of({name: keys.identity(value) for name, value in inputs.items()} | source)


def _inputs_of_training(comparison: Comparison, variant: Variant) -> dict[str, Any]:
    """Return what decides the policy of a variant, beside what all variants share."""
    inputs: dict[str, Any] = {
        "algorithm": variant.algorithm,
        "budget": f"{comparison.budget.kind}={comparison.budget.amount}",
        "training": variant.recipe.reinforce.model_dump(mode="json", exclude=NOT_DECIDING),
        "engine": [variant.recipe.engine, variant.recipe.lora],
    }
    if reward_model := comparison.reward_model:
        learned = [reward_model.model, reward_model.trees, reward_model.rewards]
        inputs["reward_model"] = [variant.recipe.reward_model, *learned]
    if comparison.teacher and variant.algorithm.teacher:
        inputs["teacher"] = comparison.teacher
    if exam := comparison.validation(variant):
        measure = comparison.recipe.verdict.measure
        inputs["validation"] = [exam.questions, exam.panel, measure]
    return inputs


def measure(
    comparison: Comparison,
    variant: Variant | None,
    step: SubStep,
    report: Report = lambda iteration, spent: None,
) -> dict[str, Any]:
    """Train a variant and ask it the held-out questions; without one, ask the cold start.

    ``report`` is called after each iteration of the training.
    """
    policy = comparison.cold_start
    trained: dict[str, Any] = {}
    if variant:
        policy, trained = _trained(comparison, variant, step, report)
    evaluation = replace(step, stage=f"{step.stage}/evaluate")
    return {**trained, **_held_out(comparison.held_out(), evaluation, policy)}


def _trained(
    comparison: Comparison, variant: Variant, step: SubStep, report: Report
) -> tuple[Artifact, dict[str, Any]]:
    """Train a variant; return the policy that it publishes, and how the training went."""
    training = Training(
        start=step,
        recipe=variant.recipe,
        algorithm=variant.algorithm,
        policy=comparison.cold_start,
        questions=comparison.questions,
        corpus=comparison.corpus,
        environment=comparison.environment,
        reader=comparison.reader,
        exam=comparison.validation(variant),
        reward_model=comparison.reward_model,
        teacher=comparison.teacher,
        most_iterations=LONGEST * variant.recipe.reinforce.iterations,
    )
    iterations, spent = train_until(training, comparison.budget, report)
    best = published(training, iterations)
    trained_tokens = [one["update"][0]["metrics"]["trained_tokens"] for one in iterations]
    return policy_of(iterations[best]), {
        "algorithm": variant.algorithm.model_dump(mode="json", by_alias=True),
        "steps_a_batch": variant.steps,
        "iterations": len(iterations),
        **({"published_iteration": best} if training.exam else {}),
        "spent": spent,
        "trained_tokens": sum(trained_tokens),
        "curve": curve_of(iterations),
        **figure_data.of_training(iterations, variant.algorithm, comparison.reader),
    }


def _held_out(exam: Exam, step: SubStep, policy: Artifact) -> dict[str, Any]:
    """Ask a policy the held-out questions; return what it got for each."""
    rows = read_rows(Path(rewards_of(answer(exam, step, policy)).path))
    answers = sorted(by_question(rows).items())  # paired by question
    kinds = {question.id: question.kind for question in load_questions(Path(exam.questions.path))}
    right = [_mean(row["success"] for row in rows_of_question) for _, rows_of_question in answers]
    assert exam.panel, "the held-out questions have a panel"
    panel = panels.load(Path(exam.panel.path))
    return {
        "panel": panels.summary(panel, exam.first, exam.recipe.evaluate.questions),
        "success": _mean(right),
        "kinds": [kinds[question] for question, _ in answers],
        "right": right,  # of each question, the share of its answers
        "scores": [
            _mean(row["score"] * row["sound"] for row in rows_of_question)
            for _, rows_of_question in answers
        ],
        **figure_data.of_answers([rows_of_question for _, rows_of_question in answers]),
    }


def _mean(values: Iterable[float]) -> float:
    every = list(values)
    return sum(every) / len(every)


def train_until(
    training: Training, budget: Budget, report: Report
) -> tuple[list[Iteration], Spent]:
    """Train until an iteration has spent the budget; return the iterations and what they spent.

    A variant that hardly spends it ends with the training's last iteration.
    """
    iterations: list[Iteration] = []
    total = dict.fromkeys(SPENT, 0.0)
    with closing(train(training)) as trained:  # ends what was sampled ahead
        for iteration in trained:
            iterations.append(iteration)
            total = {kind: total[kind] + amount for kind, amount in spent(iteration).items()}
            report(iteration, total)
            if total[budget.kind] >= budget.amount:
                break
    count = len(iterations)
    if not is_due(training, count) and count < training.iterations:  # the last one is asked, too
        last = iterations[-1]
        records = validate(training, policy_of(last), count)
        iterations[-1] = {**last, "validation": [*last.get("validation", ()), *records]}
    return iterations, total


def curve_of(iterations: Sequence[Iteration]) -> dict[str, list[float]]:
    """Return the training curve: by measure, and by kind of what was spent so far, a list each."""
    each = [spent(iteration) for iteration in iterations]
    columns = {kind: list(accumulate(one[kind] for one in each)) for kind in SPENT}
    return {
        name: [float(f"{value:.6g}") for value in values]
        for name, values in (columns | training_curve(iterations)).items()
    }


def spent(iteration: Iteration) -> Spent:
    """Return what an iteration has spent of each kind; what branches share counts once."""
    counted = together([record["metrics"] for record in iteration["rollout"]])
    return {
        kind: sum(sum_seconds(iteration).values()) if kind == "seconds" else counted[kind]
        for kind in SPENT
    }

"""The whole method in one file: an agent learns to use a Python tool, by ARPO (arXiv 2507.19849).

    python -m examples.one_file

It imitates demonstrations, then trains by reinforcement learning for twenty iterations, in about
five minutes on two cores. Each iteration draws questions, grows a tree of trajectories for each,
scores the answers, credits every token that the agent wrote, and takes one step of the optimizer.
Nothing is saved. `make run` does the same and more with the recipe params/tiny.yaml, whose values
these are: there each step is a cached, recorded stage.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

from params.schema.algorithms import load_algorithms
from params.schema.recipe import Recipe
from tasks.dialects import open_dialect
from tasks.dialects.contract import Dialect
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.environments import open_environment
from tasks.environments.contract import OpenEnvironment
from tasks.learning import fine_tuning
from tasks.learning.algorithm import assemble
from tasks.learning.credit import credited
from tasks.learning.learner import optimize
from tasks.policy.checkpoint import prepare_optimizer
from tasks.policy.machine import use_machine
from tasks.policy.resident import Learner
from tasks.policy.tiny import build_policy, build_tokenizer
from tasks.questions import computation
from tasks.questions.experts import Trace, play
from tasks.recipes import load
from tasks.rewards.scoring import score_trees
from tasks.rollouts.rounds import Setting, grow
from tasks.trees.dialogue import TAGS
from tasks.trees.marks import token_texts
from tasks.trees.tree import Call, Observation, Question, Tree


def main(recipe: Recipe, imitations: int, iterations: int) -> None:
    """Make questions and a policy, let it imitate, then let it learn from its own trajectories."""
    use_machine(recipe.machine)
    problems = computation.generate(recipe.prepare.questions, recipe.seed)
    with open_environment(recipe.tools, {}, recipe.machine.threads, Path()) as environment:
        traces = demonstrations(recipe, problems["train"], environment)
        learner = first_policy(recipe, traces)
        dialect = open_dialect(
            recipe.dialect, learner.tokenizer, recipe.dialogue, environment.specs
        )
        imitate(recipe, learner, dialect, traces, imitations)
        questions = [problem.question for problem in problems["train"]]
        improve(recipe, learner, dialect, environment, questions, iterations)


def demonstrations(
    recipe: Recipe,
    problems: Sequence[computation.ComputationQuestion],
    environment: OpenEnvironment,
) -> list[Trace]:
    """Let a scripted expert, which makes mistakes, answer the problems with the real tool."""

    def tool(calls: Sequence[Call]) -> list[Observation]:
        with environment.session() as session:
            ((episode, _),) = session.open([Question("", "", "", ())])
            return session.act([(episode, call) for call in calls])

    expert = recipe.prepare.expert
    scripts = [computation.script(problem, expert, recipe.seed) for problem in problems]
    return [played.trace for played in play(scripts, tool)]


def first_policy(recipe: Recipe, traces: Sequence[Trace]) -> Learner:
    """Build a small transformer with random weights, and a tokenizer for its few words."""
    texts = ["".join([trace.question.text, *(text for text, _ in trace.parts)]) for trace in traces]
    tokenizer = build_tokenizer(texts, recipe.prepare.policy, TAGS)
    policy = build_policy(recipe.prepare.policy, tokenizer, recipe.seed)
    return Learner(Path(), policy, tokenizer)


def imitate(
    recipe: Recipe, learner: Learner, dialect: Dialect, traces: Sequence[Trace], steps: int
) -> None:
    """Fine-tune on the demonstrations, each a tree of one leaf."""
    settings = recipe.cold_start.model_copy(update={"steps": steps})
    rows = []
    for trace in traces:
        for tokens, own in dialect.trace(trace.question, trace.parts):
            rows.append({"question_id": trace.question.id, "tokens": tokens, "trained": own})
    draw = random.Random(recipe.seed)
    for step in range(steps):
        batch = [fine_tuning.tree_of(row) for row in draw.sample(rows, settings.batch)]
        now = fine_tuning.optimizer_settings(settings, step, rows)
        prepare_optimizer(learner, now)
        loss = fine_tuning.imitate(learner, batch, now, recipe.machine)
        if (step + 1) % 100 == 0:
            print(f"imitation {step + 1}: loss {loss:.3f}", flush=True)
    learner.optimizer, learner.updates = None, 0


def improve(
    recipe: Recipe,
    learner: Learner,
    dialect: Dialect,
    environment: OpenEnvironment,
    questions: Sequence[Question],
    iterations: int,
) -> None:
    """Train on trajectories of the policy's own; print how many of them answer rightly."""
    section, budget = recipe.reinforce, recipe.dialogue.response_tokens
    algorithm = load_algorithms()[section.algorithm]
    loss = assemble(algorithm, budget).loss
    texts = token_texts(learner.tokenizer, learner.model.config.vocab_size)
    draw = random.Random(recipe.seed)
    prepare_optimizer(learner, section.update)
    for iteration in range(iterations):
        setting = Setting(
            tokenizer=learner.tokenizer,
            dialogue=recipe.dialogue,
            rollout=section.rollout,
            dialect=dialect,
            environment=environment,
            seed=f"{recipe.seed}/{iteration}",
            branching=algorithm.branching,
        )
        engine = TransformersEngine(learner.model, learner.tokenizer)
        trees: list[Tree] = grow(draw.sample(questions, section.questions), engine, setting)
        rows = score_trees(trees, section.reward, reader=dialect)
        rewards = {tree.question.id: [0.0] * len(tree.leaves) for tree in trees}
        for row in rows:
            rewards[row["question"]][row["leaf"]] = row["reward"]
        batch = credited(trees, list(rewards.values()), algorithm, budget, texts)
        metrics = optimize(
            learner, batch, loss, section.update, section.rollout.temperature, recipe.machine, 0
        )
        success = sum(row["success"] for row in rows) / len(rows)
        tokens, views = metrics["trained_tokens"], metrics["trained_views"]
        print(f"iteration {iteration}: success {success:.1%}, {tokens:.0f} tokens for {views:.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--imitations", type=int, default=1200, help="steps on demonstrations")
    parser.add_argument("--iterations", type=int, default=20, help="of reinforcement learning")
    args = parser.parse_args()
    main(load("tiny"), args.imitations, args.iterations)

"""rollout: a policy answers a batch of questions with its tools; trees come out.

Several policies may share a rollout: each but the last one leaves a part of it.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from params.schema.agent import Agent
from params.schema.algorithms import Marks
from params.schema.base import Machine
from params.schema.reinforce import Rollout
from tasks.dialects import open_dialect
from tasks.engines import ENGINES, Engine
from tasks.environments.contract import OpenEnvironment, recording
from tasks.environments.timed import Stopwatch
from tasks.ledger import substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.policy import resident
from tasks.policy.resident import Learner
from tasks.rollouts.paths import LiveTrajectory
from tasks.rollouts.rollout_parts import Resting, load_part, save_part
from tasks.rollouts.rounds import Setting, grow_part
from tasks.tools.recording import Origin
from tasks.trees import metrics, panels
from tasks.trees.outcomes import Outcome
from tasks.trees.tables import STORED_TREES, StoredQuestions, load_trees, save_trees
from tasks.trees.tree import Question, Tree, masked_leaves, spliced
from tasks.trees.words import printable

UNMARKED = Marks(kind="none")
FAILED_WORLDS = (Outcome.WORLD_FAILED, Outcome.WORLD_TIMEOUT, Outcome.WORLD_BROKEN)
AGAIN = 1_000_000  # is added to the attempt where a task is asked once more: seeds of its own


@dataclass(frozen=True)
class RolloutInputs:
    """What decides the trees of a batch."""

    policy: Artifact
    questions: Artifact
    size: int  # questions of a batch
    first: int  # the place of the iteration's first question, see ``batch``
    budget: Rollout  # paths of a question, and when they branch
    agent: Agent
    corpus: Artifact  # that the agent's tools look in
    attempt: int = 0  # batches of this iteration before this one
    branching: str = "none"  # of the algorithm, as are the marks
    marks: Marks = UNMARKED
    top_p: float = 1.0
    panel: Artifact | None = None  # whose tasks are asked, in its order; None: they are drawn
    policy_steps: int = 0  # optimizer steps that the policy has taken in training
    before: Artifact | None = None  # the part of this rollout before; None: it begins
    turns: int | None = None  # most turns of a path in this part; None: it grows to its end
    again: tuple[str, ...] = ()  # outcomes whose trajectories are sampled once more, in their place
    chosen: tuple[str, ...] | None = None  # ids of the questions, where a curriculum decides
    told: str = ""  # what the agent is told of its tools; a server may change that between starts


def told_of(environment: OpenEnvironment) -> str:
    """Return what an agent is told of its tools, as one text."""
    return json.dumps([vars(spec) for spec in environment.specs], sort_keys=True, default=str)


@substeps.recorded
def rollout(
    step: SubStep,
    inputs: RolloutInputs,
    *,
    environment: OpenEnvironment,
    acting: Callable[[Path, Machine], Learner] = resident.POLICIES.load_learner,
    advance: Callable[[int], object] = lambda finished: None,
) -> Record:
    """Roll out a batch of questions; artifact ``trees``.

    ``environment`` answers the agent's calls; ``inputs.agent`` and ``inputs.corpus`` are what it
    was opened with. ``acting`` loads the policy: the one that learns, or a copy. ``advance`` is
    called with the number of questions finished since its last call.
    """
    every = StoredQuestions(Path(inputs.questions.path))
    questions = questions_of(inputs, every, step.seed, inputs.attempt)
    stored = _stored(step, questions)
    begun = [] if stored else _begun(inputs, questions)
    origin = Origin(step.stage, step.iteration, inputs.attempt)
    with recording(environment, origin, lambda: step.ledger.scratch(step)) as recorded:
        trees, seconds = _trees(step, inputs, begun, recorded.environment, acting, advance)
        if failed := [tree for tree in trees if any(masked_leaves(tree, inputs.again))]:
            tasks = [tree.question for tree in failed]
            anew = replace(inputs, attempt=inputs.attempt + AGAIN)
            recorded.ask_again()
            second, _ = _trees(step, anew, tasks, recorded.environment, acting)
            trees = _with_second(trees, second, inputs.again)
        recorded.save_calls(step.out / "trees")
    trees = stored or trees
    _print_failures(trees)
    save_trees(trees, step.out / "trees")
    return {
        "metrics": metrics.tree_metrics(trees, inputs.budget.entropy_window),
        "profile": metrics.entropy_profile(trees),
        "seconds": seconds,
        "another_batch": bool(  # are there questions that this iteration has not asked yet?
            inputs.chosen or questions_of(inputs, every, step.seed, inputs.attempt + 1)
        ),
        "questions": [question.id for question in questions],
        "cursor": inputs.first + (inputs.attempt + 1) * inputs.size,  # the next place
    }


@substeps.recorded
def rollout_part(
    step: SubStep,
    inputs: RolloutInputs,
    *,
    environment: OpenEnvironment,
    acting: Callable[[Path, Machine], Learner] = resident.POLICIES.load_learner,
) -> Record:
    """Begin or go on with a rollout that rests afterwards; artifact ``part``.

    Another policy goes on with it: ``rollout`` or a further part, with this one as ``before``. The
    answers of the environment must be repeatable. For the arguments see ``rollout``.
    """
    every = StoredQuestions(Path(inputs.questions.path))
    questions = questions_of(inputs, every, step.seed, inputs.attempt)
    begun = [] if _stored(step, questions) else _begun(inputs, questions)
    grown, seconds = _grown(step, inputs, begun, environment, acting)
    save_part(grown, step.out / "part")
    ids = [question.id for question in questions]
    return {"metrics": {}, "seconds": seconds, "questions": ids}


def _print_failures(trees: Sequence[Tree]) -> None:
    """Print how many worlds have failed, by outcome, and what the first of each said."""
    failed: dict[str, list[str]] = {}
    leaves = [(tree, leaf) for tree in trees for leaf in tree.leaves]
    for tree, leaf in leaves:
        node = tree.nodes[leaf]
        if node.outcome in FAILED_WORLDS:
            seen = node.observation or tree.nodes[0].observation
            lines = [line for line in (seen.text if seen else "").splitlines() if line.strip()]
            failed.setdefault(node.outcome, []).append(
                f"{tree.question.id}: {lines[-1].strip()[:300] if lines else 'no reason is known'}"
            )
    for outcome, reasons in failed.items():
        count = f"{len(reasons)} of {len(leaves)} episodes are {outcome}"
        print(printable(f"rollout: {count}; the first: {reasons[0]}"), flush=True)


def _trees(
    step: SubStep,
    inputs: RolloutInputs,
    begun: Sequence[Question | Resting],
    environment: OpenEnvironment,
    acting: Callable[[Path, Machine], Learner],
    advance: Callable[[int], object] = lambda finished: None,
) -> tuple[list[Tree], dict[str, float]]:
    """Grow trees to their ends, by the recipe's program where it has one; and seconds by part."""
    if not inputs.agent.program:
        grown, seconds = _grown(step, inputs, begun, environment, acting, advance)
        return [paths[0].tree for paths in grown], seconds
    from tasks.programs.program_rollout import grow_programs  # with a server, for this alone

    agent, actor = inputs.agent, acting(Path(inputs.policy.path), inputs.agent.machine)
    questions = [one for one in begun if isinstance(one, Question)]
    setting = _setting(step, inputs, actor.tokenizer, environment)
    began = time.perf_counter()
    sampling = _engine(inputs, actor)
    trees, counts = grow_programs(
        questions, sampling, setting, inputs.top_p, environment.program, agent.dialect, advance
    )
    sampling.release()
    if counts.early_rounds:
        print(
            f"rollout: {counts.early_rounds} of {counts.rounds} rounds were sampled without "
            "programs that still worked after 'patience': last bits may differ in a second run",
            flush=True,
        )
    worked = time.perf_counter() - began - counts.idle
    return trees, {"sampling": worked, "tools": counts.idle}


def _grown(
    step: SubStep,
    inputs: RolloutInputs,
    begun: Sequence[Question | Resting],
    environment: OpenEnvironment,
    acting: Callable[[Path, Machine], Learner],
    advance: Callable[[int], object] = lambda finished: None,
) -> tuple[list[list[LiveTrajectory]], dict[str, float]]:
    """Grow trees from questions or from where they rest; return paths, and seconds by part."""
    agent = inputs.agent
    actor = acting(Path(inputs.policy.path), agent.machine)
    timed = Stopwatch(environment)
    answering = OpenEnvironment(environment.specs, timed.session)
    setting = _setting(step, inputs, actor.tokenizer, answering)
    began = time.perf_counter()
    sampling = _engine(inputs, actor)
    grown = grow_part(begun, sampling, setting, inputs.top_p, inputs.turns, advance)
    sampling.release()
    seconds = time.perf_counter() - began
    lanes = len(sampling.replicas(max(1, len(begun))))
    waited = sum(timed.seconds) / lanes  # of a replica, on average
    return grown, {"sampling": seconds - waited, "tools": waited}


def _engine(inputs: RolloutInputs, actor: Learner) -> Engine:
    """Open the recipe's engine for a policy."""
    agent = inputs.agent
    return ENGINES[agent.engine.kind].open(
        actor, inputs.policy, agent.engine, agent.machine, inputs.budget.rows
    )


def _with_second(
    trees: Sequence[Tree], second: Sequence[Tree], outcomes: Sequence[str]
) -> list[Tree]:
    """Return the trees, with trajectories of the second attempt in place of those that failed."""
    attempts = {tree.question.id: tree for tree in second}
    return [
        _replaced(tree, attempts[tree.question.id], masked_leaves(tree, outcomes))
        if tree.question.id in attempts
        else tree
        for tree in trees
    ]


def _replaced(tree: Tree, second: Tree, failed: Sequence[bool]) -> Tree:
    """Return the tree with leaves of the second where its own failed.

    Where all have failed, the prompt may lack what the world shows first: the second has it.
    """
    if all(failed):
        return second
    return spliced([(second if lost else tree, leaf) for leaf, lost in enumerate(failed)])


def _begun(inputs: RolloutInputs, questions: Sequence[Question]) -> Sequence[Question | Resting]:
    """Return what grows: trees that rest, or questions."""
    return load_part(Path(inputs.before.path)) if inputs.before else questions


def _setting(
    step: SubStep, inputs: RolloutInputs, tokenizer: Any, environment: OpenEnvironment
) -> Setting:
    """Return how the batch is rolled out; its seed is that of the iteration and the attempt."""
    agent, attempt = inputs.agent, f"/{inputs.attempt}" if inputs.attempt else ""
    return Setting(
        tokenizer=tokenizer,
        dialogue=agent.dialogue,
        rollout=inputs.budget,
        dialect=open_dialect(agent.dialect, tokenizer, agent.dialogue, environment.specs),
        environment=environment,
        seed=f"{step.seed}/{step.iteration}{attempt}",
        branching=inputs.branching,
        marks=inputs.marks,
        policy_steps=inputs.policy_steps,
    )


def _stored(step: SubStep, questions: Sequence[Question]) -> list[Tree]:
    """Return the stored trees of these questions where a run is replayed from its trees, else [].

    Raises ValueError where a question has no stored tree.
    """
    folder = os.environ.get(STORED_TREES.get(step.stage, ""))
    if not folder:
        return []
    iteration = step.iteration if step.stage == "reinforce" else None
    trees = {tree.question: tree for tree in load_trees(Path(folder), iteration)}
    if lacking := [question.id for question in questions if question not in trees]:
        raise ValueError(
            f"{folder} has no tree for question {lacking[0]} in iteration {step.iteration}, as it "
            "is now: the questions, or how they are drawn, are not what they were"
        )
    return [trees[question] for question in questions]


def questions_of(
    inputs: RolloutInputs, every: Sequence[Question], seed: int, attempt: int
) -> list[Question]:
    """Return the questions of a batch: drawn by the seed, or the panel's from ``first`` on."""
    if inputs.chosen is not None:
        wanted = {question.id: question for question in every if question.id in inputs.chosen}
        return [wanted[name] for name in inputs.chosen]
    if inputs.panel is None:
        return batch(every, seed, inputs.first, attempt, inputs.size)
    panel = panels.load(Path(inputs.panel.path))
    panel_part = panel.part(inputs.first + attempt * inputs.size, inputs.size)
    return panels.questions_of(panel_part, every, inputs.panel.path)


def pass_order(count: int, seed: int, number: int) -> list[int]:
    """Return the order in which a pass takes ``count`` questions."""
    order = list(range(count))
    random.Random(f"{seed}/pass {number}").shuffle(order)
    return order


def batch(
    questions: Sequence[Question], seed: int, first: int, attempt: int, size: int
) -> list[Question]:
    """Return the questions of a batch; each pass over all questions has its own order.

    Counters decide: an iteration that begins at place ``first`` of the endless sequence of passes
    takes ``size`` places, and as many more for each further ``attempt`` (DAPO's dynamic sampling);
    so a resumed run meets the questions that an unbroken run would have met. No question comes
    twice in an iteration.
    """
    positions = range(first, first + (attempt + 1) * size)
    orders: dict[int, list[int]] = {}
    for number in {position // len(questions) for position in positions}:
        orders[number] = pass_order(len(questions), seed, number)
    indices = [
        orders[position // len(questions)][position % len(questions)] for position in positions
    ]
    before = set(indices[: attempt * size])
    return [questions[i] for i in dict.fromkeys(indices[attempt * size :]) if i not in before]

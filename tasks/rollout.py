"""rollout: a policy answers a batch of questions with its tools; trees come out."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import task

from params.schema.agent import Dialogue, Engine, PythonTool, Search
from params.schema.algorithms import Marks
from params.schema.base import Machine
from params.schema.reinforce import Rollout
from tasks.engines import ENGINES
from tasks.environments.toolbox import Respond
from tasks.ledger import prefect_cache, substeps
from tasks.ledger.artifacts import Artifact, Step
from tasks.policy import resident
from tasks.policy.resident import Learner
from tasks.rollouts.rounds import Setting, grow
from tasks.trees import metrics
from tasks.trees.tables import STORED_TREES, load_questions, load_trees, save_trees
from tasks.trees.tree import Call, Observation, Question, Tree


@task(**prefect_cache.TASK_OPTIONS)
@substeps.recorded
def rollout(
    step: Step,
    folder: Path,
    *,
    policy: Artifact,
    questions: Artifact,
    size: int,
    first: int,
    attempt: int,
    branching: str,
    marks: Marks,
    budget: Rollout,
    top_p: float,
    dialogue: Dialogue,
    engine: Engine,
    machine: Machine,
    limits: PythonTool,
    search: Search | None,
    corpus: Artifact,
    tools: Respond,
    acting: Callable[[Path, Machine], Learner] = resident.load_learner,
    advance: Callable[[int], object] = lambda finished: None,
) -> Mapping[str, Any]:
    """Roll out ``size`` questions; artifact ``trees``.

    ``first`` and ``attempt`` say which (see ``batch``). ``branching`` and ``marks`` are a row's,
    ``budget`` says how many paths a question gets; ``top_p`` is 1 in training.
    ``limits``, ``search`` and ``corpus`` are what ``tools`` were made of, which cannot speak for
    themselves in the ledger's key. ``acting`` opens the policy: the one that learns, or a copy.
    ``advance`` is told how many more questions have been finished.
    """
    every = load_questions(Path(questions.path))
    chosen = batch(every, step.seed, first, attempt, size)
    actor = acting(Path(policy.path), machine)
    timed, tool_seconds = _stopwatch(tools)
    seed = f"{step.seed}/{step.iteration}" + (f"/{attempt}" if attempt else "")
    setting = Setting(actor.tokenizer, dialogue, budget, timed, seed, branching, marks)
    began = time.perf_counter()
    sampling = ENGINES[engine.kind].open(actor, policy, engine, machine, budget.rows)
    trees = _stored(step, chosen) or grow(chosen, sampling, setting, top_p, advance)
    sampling.release()
    seconds = time.perf_counter() - began
    waited = sum(tool_seconds) / len(sampling.replicas(len(chosen)))  # of a lane, on average
    save_trees(trees, folder / "trees")
    return {
        "metrics": metrics.tree_metrics(trees, budget.entropy_window),
        "profile": metrics.entropy_profile(trees),
        "seconds": {"sampling": seconds - waited, "tools": waited},
        "another_batch": bool(batch(every, step.seed, first, attempt + 1, size)),  # of new ones
        "questions": [question.id for question in chosen],
        "cursor": first + (attempt + 1) * size,  # the next place in the sequence of passes
    }


def _stored(step: Step, chosen: Sequence[Question]) -> list[Tree]:
    """The trees that an earlier run has grown under these questions, where they are to be replayed.

    Raises ValueError where that run had none for one of them.
    """
    folder = os.environ.get(STORED_TREES)
    if not folder or step.stage != "reinforce":
        return []
    trees = {tree.question: tree for tree in load_trees(Path(folder), step.iteration)}
    if lacking := [question.id for question in chosen if question not in trees]:
        raise ValueError(
            f"{folder} has no tree for question {lacking[0]} in iteration {step.iteration}, as it "
            "is now: the questions, or how they are drawn, are not what they were"
        )
    return [trees[question] for question in chosen]


def batch(
    questions: Sequence[Question], seed: int, first: int, attempt: int, size: int
) -> list[Question]:
    """The questions of an iteration's batch: each pass over all goes in an order of its own.

    Counters decide: an iteration that begins at place ``first`` of the endless sequence of passes
    takes ``size`` places, and as many more for each further ``attempt`` (DAPO's dynamic sampling);
    so a resumed run meets the questions that an unbroken run would have met. No question comes
    twice in an iteration.
    """
    places = range(first, first + (attempt + 1) * size)
    orders: dict[int, list[int]] = {}
    for number in {place // len(questions) for place in places}:
        orders[number] = list(range(len(questions)))
        random.Random(f"{seed}/pass {number}").shuffle(orders[number])
    chosen = [orders[place // len(questions)][place % len(questions)] for place in places]
    before = set(chosen[: attempt * size])
    return [questions[i] for i in dict.fromkeys(chosen[attempt * size :]) if i not in before]


def _stopwatch(tools: Respond) -> tuple[Respond, list[float]]:
    """The same tools, and the seconds that each round of calls took."""
    seconds: list[float] = []

    def timed(calls: Sequence[Call]) -> list[Observation]:
        began = time.perf_counter()
        observations = tools(calls)
        seconds.append(time.perf_counter() - began)
        return observations

    return timed, seconds

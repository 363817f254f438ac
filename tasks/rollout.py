"""rollout: a policy answers a batch of questions with its tools; trees come out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import task

from params.schema import Dialogue, Machine, PythonTool, Rollout, Search
from tasks import checkpoint, ledger, statistics
from tasks.engines.transformers import TransformersEngine
from tasks.ledger import Artifact, Step
from tasks.sampler import Setting, grow
from tasks.toolbox import Respond
from tasks.trajectory import Call, Observation, Question, load_questions, save_trees


@task(**ledger.TASK_OPTIONS)
@ledger.recorded
def rollout(
    step: Step,
    folder: Path,
    *,
    policy: Artifact,
    questions: Artifact,
    size: int,
    budget: Rollout,
    top_p: float,
    dialogue: Dialogue,
    machine: Machine,
    limits: PythonTool,
    search: Search | None,
    corpus: Artifact,
    tools: Respond,
    advance: Callable[[int], object] = lambda finished: None,
) -> Mapping[str, Any]:
    """Roll out ``size`` questions; artifact ``trees``.

    ``budget`` says how many paths a question gets and when they branch; ``top_p`` is 1 in training.
    ``limits``, ``search`` and ``corpus`` are what ``tools`` were made of, which cannot speak for
    themselves in the ledger's key.
    ``advance`` is told how many more questions have been finished.
    """
    chosen = batch(load_questions(Path(questions.path)), step, size)
    acting = checkpoint.resident(Path(policy.path), machine)
    timed, tool_seconds = _stopwatch(tools)
    setting = Setting(acting.tokenizer, dialogue, budget, timed, f"{step.seed}/{step.iteration}")
    began = time.perf_counter()
    engine = TransformersEngine(acting.model, acting.tokenizer)
    trees = grow(chosen, engine, setting, top_p, advance)
    seconds = time.perf_counter() - began
    save_trees(trees, folder / "trees")
    return {
        "metrics": statistics.tree_metrics(trees, budget.entropy_window),
        "profile": statistics.entropy_profile(trees),
        "seconds": {"sampling": seconds - sum(tool_seconds), "tools": sum(tool_seconds)},
    }


def batch(questions: Sequence[Question], step: Step, size: int) -> list[Question]:
    """The questions of one iteration: each pass over all of them goes in an order of its own.

    A counter decides: iteration i takes the places i * size ... of the endless sequence of passes,
    so a resumed run meets the questions that an unbroken run would have met.
    """
    places = range(step.iteration * size, (step.iteration + 1) * size)
    orders: dict[int, list[int]] = {}
    for number in {place // len(questions) for place in places}:
        orders[number] = list(range(len(questions)))
        random.Random(f"{step.seed}/pass {number}").shuffle(orders[number])
    chosen = [orders[place // len(questions)][place % len(questions)] for place in places]
    return [questions[index] for index in dict.fromkeys(chosen)]


def _stopwatch(tools: Respond) -> tuple[Respond, list[float]]:
    """The same tools, and the seconds that each round of calls took."""
    seconds: list[float] = []

    def timed(calls: Sequence[Call]) -> list[Observation]:
        began = time.perf_counter()
        observations = tools(calls)
        seconds.append(time.perf_counter() - began)
        return observations

    return timed, seconds

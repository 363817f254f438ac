"""A user's part of the reward: a function in a file of ``own/``.

``own/brevity.py``::

    def brevity(ending):
        return max(0.0, 1 - len(ending.text) / 2000)

It takes one ``Ending`` (contract.py) and returns a number (True counts as 1). In the trajectory of
that ending, nodes have no tokens. The recipe names the function, its weight and its range::

    reward:
      - answer: {weight: 1.0, wrong: 0.0}
      - own/brevity.py:brevity: {weight: 0.2, low: 0.0, high: 1.0, seconds: 10}

It runs in processes of its own. A call that raises an error, takes longer than ``seconds``, or
returns anything but a number in the range stops the run: zeros in its place would train the agent
on a reward that nobody wrote.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from pydantic import model_validator

from params.schema.base import Float, Frozen, PositiveFloat
from tasks.extensions import checks
from tasks.extensions.pool import Reply, open_pool
from tasks.extensions.user_code_worker import load
from tasks.rewards.contract import Ending, Part, PartKind
from tasks.trees.tree import Message, Node, Observation, Question, results_of

SIGNATURE = "def brevity(ending)"
WORKERS = min(4, len(os.sched_getaffinity(0)))  # processes
SHOWN = 80  # characters of a value in a message
CALLER = "tasks/rewards/function.py:Caller"


class FunctionSettings(Frozen):
    """The settings: the function's value is multiplied by ``weight``."""

    weight: Float = 1.0
    low: Float = 0.0  # of what the function returns
    high: Float = 1.0
    seconds: PositiveFloat = 10.0  # of one call

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> FunctionSettings:
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} exceeds high {self.high:g}: exchange them")
        return self


def kind_of(reference: str, held: Any) -> PartKind:
    """Return the kind of part that a user's function is. Raises ValueError where it is none."""
    if fault := checks.signature_fault(held, SIGNATURE):
        raise ValueError(f"{reference} {fault}")
    return PartKind(
        FunctionSettings,
        partial(open_function, reference),
        bounds,
        label=lambda name, settings: name.rpartition(":")[2],
    )


def bounds(settings: FunctionSettings) -> tuple[float, float]:
    """Return the lowest and the highest value of the part."""
    values = (settings.weight * settings.low, settings.weight * settings.high)
    return min(values), max(values)


@contextmanager
def open_function(reference: str, settings: FunctionSettings) -> Iterator[Part]:
    """Keep processes ready that hold the function.

    The part raises ValueError with file, function, question, leaf and what is wrong.
    """
    with open_pool(CALLER, {"reference": reference}, WORKERS, settings.seconds) as pool:

        def part(endings: Sequence[Ending]) -> list[float]:
            replies = pool.call_all([[written(ending)] for ending in endings])
            for ending, reply in zip(endings, replies, strict=True):
                if fault := _fault(reply, settings):
                    where = f"{reference}, question {ending.question.id}, leaf {ending.leaf}"
                    raise ValueError(f"{where}: {fault}")
            bounds = (settings.low, settings.high)
            return [
                settings.weight * checks.within(reply.value["number"], *bounds) for reply in replies
            ]

        yield part


def _fault(reply: Reply, settings: FunctionSettings) -> str:
    """Return what is wrong with a call, and the remedy, or ""."""
    if reply.failure:
        return f"{reply.failure}: {reply.message}: correct the function, or raise its seconds"
    if reply.value["fault"]:
        return f"it returned {reply.value['shown']}, which {reply.value['fault']}: return a number"
    if outside := checks.number_fault(reply.value["number"], settings.low, settings.high):
        return f"the value {outside}: return less, or declare the range with 'low' and 'high'"
    return ""


# ---------------------------------------------------------------- in the function's process


class Caller:
    """A user's function in its own process, which is asked with what ``written`` writes."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.function = load(settings["reference"])

    def __call__(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the number, or what is wrong with the function's value."""
        value = self.function(read(values))
        fault = checks.number_fault(value)
        number = 0.0 if fault else float(value)
        return {"number": number, "fault": fault, "shown": repr(value)[:SHOWN] if fault else ""}


def written(ending: Ending) -> dict[str, Any]:
    """Return an ending as JSON, without its tokens."""
    question = ending.question
    before = [vars(message) for message in question.before]
    return {
        **vars(ending),
        "question": {**vars(question), "answers": list(question.answers), "before": before},
        "trajectory": [
            {
                **{name: getattr(node, name) for name in ("parent", "kind", "outcome", "text")},
                "observation": vars(node.observation) if node.observation else None,
                "results": [vars(result) for result in node.results],
            }
            for node in ending.trajectory
        ],
        "faults": list(ending.faults),
        "breakdown": dict(ending.breakdown),
        "tools": sorted(ending.tools),
    }


def read(values: Mapping[str, Any]) -> Ending:
    """Return the ending that ``written`` has written."""
    question = values["question"]
    lists = {
        "answers": tuple(question["answers"]),
        "before": tuple(Message(**message) for message in question["before"]),
    }
    return Ending(
        **{
            **values,
            "question": Question(**{**question, **lists}),
            "trajectory": [_node(node) for node in values["trajectory"]],
            "tools": frozenset(values["tools"]),
        }
    )


def _node(values: Mapping[str, Any]) -> Node:
    tokens, scores = np.zeros(0, np.int32), np.zeros(0, np.float32)
    seen = values["observation"]
    observation = Observation(**{**seen, "actions": tuple(seen["actions"])}) if seen else None
    read = {"observation": observation, "results": results_of(values["results"])}
    return Node(**{**values, **read}, tokens=tokens, logprobs=scores, entropies=scores)

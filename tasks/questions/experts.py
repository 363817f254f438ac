"""The result of every source of questions, and the traces of scripted experts.

A script is an expert's plan for one question: the tool calls, whose arguments may depend on the
results before, and the answer. ``play`` runs many scripts against the real tools, a round of calls
at a time, as a rollout does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks.environments import Respond
from tasks.questions.faults import Fault, Place
from tasks.trees.tree import Call, Document, Observation, Question

Parts = list[tuple[str, bool]]  # (text, whether the agent wrote it)
Results = Sequence[str]  # the texts of a script's tool results so far


@dataclass(frozen=True)
class Move:
    """A turn that ends with a tool call."""

    thought: str
    tool: str
    argument: Callable[[Results], str]


@dataclass(frozen=True)
class Script:
    """An expert's plan for one question; ``flaw`` names its mistake, or is "none"."""

    question: Question
    flaw: str
    moves: tuple[Move, ...]
    thought: str  # before the answer
    answer: Callable[[Results], str]


@dataclass(frozen=True)
class Trace:
    """A written response to a training question, for the cold start.

    In a world, ``acts`` are what the expert did, and ``seen`` is what the world showed: at first,
    and after each act but the last.
    """

    question: Question
    flaw: str
    parts: Parts
    place: Place = ""  # in the user's file
    acts: tuple[Call, ...] = ()
    seen: tuple[Observation, ...] = ()


@dataclass(frozen=True)
class Dropped:
    """A question that was left out or got no trace, with the reason."""

    question_id: str
    reason: str  # a fixed name, such as "duplicate"
    detail: str


@dataclass(frozen=True)
class Material:
    """Questions by split, their corpus, and what an expert is told of them (contract.Lesson).

    ``write_traces`` writes the traces, given the open tools or the world.
    """

    questions: Mapping[str, Sequence[Question]]
    write_traces: Callable[[Any], tuple[list[Trace], list[Dropped]]] = lambda tools: ([], [])
    known: Any = None  # of the training questions
    read: Sequence[Question] = ()  # all records of the training sets
    left_out: Mapping[str, str] = field(default_factory=dict)  # question id -> why not trained on
    documents: list[Document] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)  # questions without a place in any split
    faults: list[Fault] = field(default_factory=list)  # of records that are in no split
    unsound: list[Question] = field(default_factory=list)  # of these records, where it can be read
    # given ids of questions, returns those that are records of a file, each with its place there
    places: Callable[[Collection[str]], Mapping[str, Place]] = lambda ids: {}


@dataclass(frozen=True)
class Played:
    """A script after its calls: the observations, the answer, and the trace."""

    script: Script
    observations: tuple[Observation, ...]
    answer: str
    trace: Trace


def draw_flaw(rates: Mapping[str, float], draw: random.Random) -> str:
    """Draw one of the flaws, each at its rate, or "none"."""
    flaws = {"none": 1 - sum(rates.values()), **rates}
    return draw.choices(list(flaws), list(flaws.values()))[0]


def play(scripts: Sequence[Script], tools: Respond) -> list[Played]:
    """Run the scripts: the first calls of all together, then the second calls, and so on."""
    results: list[list[Observation]] = [[] for _ in scripts]
    parts: list[Parts] = [[] for _ in scripts]
    for number in range(max((len(script.moves) for script in scripts), default=0)):
        calling = [i for i, script in enumerate(scripts) if number < len(script.moves)]
        moves = [scripts[i].moves[number] for i in calling]
        arguments = [
            move.argument(texts(results[i])) for i, move in zip(calling, moves, strict=True)
        ]
        observations = tools(
            [Call(move.tool, text) for move, text in zip(moves, arguments, strict=True)]
        )
        for i, move, argument, seen in zip(calling, moves, arguments, observations, strict=True):
            results[i].append(seen)
            parts[i] += [
                (f"<think>{move.thought}</think><{move.tool}>{argument}</{move.tool}>", True),
                (f"<result>{seen.text.strip()}</result>", False),
            ]
    return [_conclude(*each) for each in zip(scripts, results, parts, strict=True)]


def texts(observations: Sequence[Observation]) -> list[str]:
    """Return the observations' texts without surrounding space."""
    return [seen.text.strip() for seen in observations]


def _conclude(script: Script, observations: Sequence[Observation], parts: Parts) -> Played:
    answer = script.answer(texts(observations))
    end = f"<think>{script.thought}</think><answer>\\boxed{{{answer}}}</answer>"
    trace = Trace(script.question, script.flaw, [*parts, (end, True)])
    return Played(script, tuple(observations), answer, trace)

"""What every source of questions hands over, and how a scripted expert's traces are written.

A script is an expert's plan for one question: which tool it calls with what, given what the calls
before have answered, and how it concludes. ``play`` runs many scripts against the real tools, a
round of calls at a time, as a rollout does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tasks.environments import Respond
from tasks.trees.tree import Call, Document, Observation, Question

Parts = list[tuple[str, bool]]  # (text, whether the agent wrote it)
Results = Sequence[str]  # the texts of a script's tool results so far


@dataclass(frozen=True)
class Move:
    """One turn that ends in a tool call."""

    thought: str
    tool: str
    argument: Callable[[Results], str]


@dataclass(frozen=True)
class Script:
    """An expert's plan for one question; ``flaw`` names how it is wrong, "none" elsewhere."""

    question: Question
    flaw: str
    moves: tuple[Move, ...]
    thought: str  # before the answer
    answer: Callable[[Results], str]


@dataclass(frozen=True)
class Trace:
    """One written answer to a training question, for the cold start."""

    question: Question
    flaw: str
    parts: Parts


@dataclass(frozen=True)
class Dropped:
    """A question that was left out or got no trace, and why."""

    question_id: str
    reason: str  # a name
    detail: str


@dataclass(frozen=True)
class Material:
    """Questions by split, the corpus that belongs to them, and who writes their traces."""

    questions: dict[str, list[Question]]
    write_traces: Callable[[Respond], tuple[list[Trace], list[Dropped]]]
    documents: list[Document] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)  # before any trace was written


@dataclass(frozen=True)
class Played:
    """A script after its calls: what the tools said, the answer, and the trace."""

    script: Script
    observations: tuple[Observation, ...]
    answer: str
    trace: Trace


def draw_flaw(rates: Mapping[str, float], draw: random.Random) -> str:
    """One of the flaws, each at its rate, or "none"."""
    flaws = {"none": 1 - sum(rates.values()), **rates}
    return draw.choices(list(flaws), list(flaws.values()))[0]


def play(scripts: Sequence[Script], tools: Respond) -> list[Played]:
    """Run the scripts, the first calls of all together, then the second ones, and so on."""
    heard: list[list[Observation]] = [[] for _ in scripts]
    parts: list[Parts] = [[] for _ in scripts]
    for number in range(max((len(script.moves) for script in scripts), default=0)):
        calling = [i for i, script in enumerate(scripts) if number < len(script.moves)]
        moves = [scripts[i].moves[number] for i in calling]
        arguments = [move.argument(texts(heard[i])) for i, move in zip(calling, moves, strict=True)]
        observations = tools(
            [Call(move.tool, text) for move, text in zip(moves, arguments, strict=True)]
        )
        for i, move, argument, seen in zip(calling, moves, arguments, observations, strict=True):
            heard[i].append(seen)
            parts[i] += [
                (f"<think>{move.thought}</think><{move.tool}>{argument}</{move.tool}>", True),
                (f"<result>{seen.text.strip()}</result>", False),
            ]
    return [_conclude(*each) for each in zip(scripts, heard, parts, strict=True)]


def texts(observations: Sequence[Observation]) -> list[str]:
    """What the tools said, without surrounding space."""
    return [seen.text.strip() for seen in observations]


def _conclude(script: Script, observations: Sequence[Observation], parts: Parts) -> Played:
    answer = script.answer(texts(observations))
    end = f"<think>{script.thought}</think><answer>\\boxed{{{answer}}}</answer>"
    trace = Trace(script.question, script.flaw, [*parts, (end, True)])
    return Played(script, tuple(observations), answer, trace)

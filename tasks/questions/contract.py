"""The contract of an expert, who writes the SFT traces: a file of this room, or one of the user's.

A recipe names it in ``prepare.expert.kind``: ``computation`` is the file computation.py of this
room, which holds an ExpertKind as EXPERT; ``own/tutor.py:Tutor`` is a class in a user's file, which
has no more than

    class Tutor:
        def write(self, questions, tools):
            return [(question, "<answer>\\boxed{1}</answer>") for question in questions]

``tools`` is what a recipe gives its agent: a function from a list of Call to a list of Observation,
or an OpenEnvironment where the recipe names a world. A response has tool calls and results in it
(data/sources/README.md), and the user may return whole Traces instead. A nested class
``Settings(Frozen)`` declares further keys of ``prepare.expert``; the object is then made from it.
Call, Frozen and Trace are in ``beamline.experts``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, model_validator

from params.schema.base import Positive
from params.schema.prepare import Expert, Questions
from tasks.questions.entries import Problems
from tasks.questions.experts import Dropped, Parts, Trace
from tasks.questions.faults import Fault
from tasks.trees.tree import Question

Write = Callable[[Any], tuple[list[Trace], list[Dropped]]]  # given the open tools, or the world
TraceProblem = Callable[[Parts], str]  # returns what is wrong with a trace, or ""
Right = Callable[[Question, str], bool]  # whether an answer to a question is right


class ExpertSettings(Expert):
    """Base class of the settings of an expert."""

    model_config = ConfigDict(extra="forbid")

    def rates(self) -> dict[str, float]:
        """Return the share of traces with each flaw, where it is known."""
        return {}


class ScriptedExpert(ExpertSettings):
    """A scripted expert that writes so many traces, and its error rates."""

    traces: Positive

    def rates(self) -> dict[str, float]:
        """Return the share of traces with each flaw; a trace has at most one flaw."""
        return {name: rate for name, rate in self if name not in ("kind", "traces")}

    @model_validator(mode="after")
    def _rates_leave_room(self) -> ScriptedExpert:
        if sum(self.rates().values()) > 1:
            raise ValueError(
                f"the error rates add up to {sum(self.rates().values())}, and a trace has at most "
                "one flaw: lower them to a sum of at most 1"
            )
        return self


@dataclass(frozen=True)
class Rules:
    """What the records of the user's files have to satisfy."""

    problems: Problems
    trace_problem: TraceProblem
    right: Right
    longest_trace: int  # characters


@dataclass(frozen=True)
class Lesson:
    """What an expert is given.

    ``known`` is what the source knows of the training questions beyond their texts: for generated
    ones how they were made, for sets the worked solutions, in the order of the questions.
    """

    questions: Sequence[Question]  # of the training split
    known: Any
    seed: int
    rules: Rules
    read: Sequence[Question] = ()  # all records of the training sets, those left out included
    left_out: Mapping[str, str] = field(default_factory=dict)  # question id -> why


@dataclass(frozen=True)
class ExpertKind:
    """A kind of expert: its settings in a recipe, what it can answer, and how it writes.

    ``open(settings, lesson)`` reads what there is to read, and returns what writes the traces when
    the tools are open, and the faults of the user's records. ``sources`` are the sources of
    questions that it can answer; () for all. ``faults(settings, questions, tools)`` returns one
    line for each setting that does not fit the recipe's questions and tools. ``files`` are those
    that it reads, with their keys in the recipe. ``solutions``: whether it needs worked solutions.
    ``sampled``: its traces are sampled after the questions are made (tasks/select_traces.py).
    """

    settings: type[ExpertSettings]
    open: Callable[[Any, Lesson], tuple[Write, list[Fault]]]
    sources: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()  # that it calls
    faults: Callable[[Any, Questions, Sequence[str]], list[str]] = lambda *_: []
    files: Callable[[Any], list[tuple[str, Path]]] = lambda settings: []
    solutions: bool = False
    sampled: bool = False

"""The expert that a recipe names: found by name or path, and its settings checked by its own file.

This module stands between the generic section ``prepare.expert`` and the files of experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

from pydantic import create_model

from params.schema.prepare import Expert, Questions
from params.schema.reading import validate
from tasks.extensions import named
from tasks.extensions.user_code_worker import ending_forks
from tasks.questions.contract import ExpertKind, ExpertSettings, Lesson, Write
from tasks.questions.experts import Dropped, Trace
from tasks.questions.faults import Fault
from tasks.questions.written import read_parts
from tasks.tools.own_tool import own_settings
from tasks.trees.tree import Question

NO_TRACE = "no_trace"  # the reason of a response that is no trace


def find(name: str) -> ExpertKind:
    """Return a kind of expert by the name of its file, or by the path of a user's file.

    Raises ValueError with name, reason and remedy.
    """
    held = named.find("expert", name).held
    return held if isinstance(held, ExpertKind) else _own(held, name)


def sources_digest(expert: Expert | None) -> str:
    """Return a digest of the files that an expert is made of; "" without one."""
    return named.find("expert", expert.kind).sources if expert else ""


def typed(
    expert: Expert | None, questions: Questions, tools: Sequence[str], where: str
) -> tuple[ExpertSettings | None, list[str]]:
    """Return the settings of an expert as its file declares them, and all that is wrong with them.

    ``tools`` are the names of the agent's tools. Each fault is a line that begins with ``where``,
    and has key, value and remedy; without faults there are settings, but for a recipe without an
    expert.
    """
    if expert is None:
        return None, []
    try:
        kind = find(expert.kind)
    except ValueError as error:
        return None, [f"{where}: 'prepare.expert.kind' = {expert.kind!r}: {error}"]
    faults = _misfits(expert.kind, kind, questions, tools)
    settings, wrong = None, []
    try:
        settings = validate(kind.settings, expert.model_dump(), where, ("prepare", "expert"))
        faults += _too_many_traces(settings, questions)
        faults += kind.faults(settings, questions, tools)
    except ValueError as error:
        wrong = str(error).splitlines()
    return settings, [*wrong, *(f"{where}: {fault}" for fault in faults)]


def _misfits(name: str, kind: ExpertKind, questions: Questions, tools: Sequence[str]) -> list[str]:
    """Return what keeps an expert from answering questions of a source with these tools."""
    misfits = []
    if kind.sources and questions.source not in kind.sources:
        able = [
            other
            for other in named.names("expert")
            if not (sources := find(other).sources) or questions.source in sources
        ]
        misfits.append(
            f"prepare: questions.source is {questions.source} and expert.kind is {name}, which "
            f"cannot answer them: set expert.kind to {' or '.join(able)}"
        )
    if missing := [tool for tool in kind.tools if tool not in tools]:
        misfits.append(
            f"tools has {list(tools)} and prepare.expert.kind is {name}, which calls "
            f"{' and '.join(missing)}: add {' and '.join(f'tools.{each}' for each in missing)}"
        )
    return misfits


def _too_many_traces(settings: ExpertSettings, questions: Questions) -> list[str]:
    rows, traces = questions.rows(), getattr(settings, "traces", None)
    if rows and isinstance(traces, int) and traces > rows["train"]:
        return [
            f"prepare: expert.traces {traces} exceeds questions.train {rows['train']}, and the "
            "expert answers each question once: lower expert.traces"
        ]
    return []


# ---------------------------------------------------------------- a user's own


def _own(held: Any, name: str) -> ExpertKind:
    """Return the kind of a user's class. Raises ValueError for one that is no expert."""
    fault = _class_fault(held)
    if fault:
        raise ValueError(f"{name} {fault} (tasks/questions/contract.py has an example)")
    declared = hasattr(held, "Settings")
    bases = (own_settings(held, name), ExpertSettings) if declared else (ExpertSettings,)
    settings = cast(type[ExpertSettings], create_model("Settings", __base__=bases))

    def open_own(expert_settings: ExpertSettings, lesson: Lesson) -> tuple[Write, list[Fault]]:
        return lambda tools: _written(
            held(expert_settings) if declared else held(), name, lesson, tools
        ), []

    return ExpertKind(settings, open_own)


def _class_fault(held: Any) -> str:
    """Describe why an object of a user's file is no expert, or return ""."""
    if not inspect.isclass(held) or not callable(getattr(held, "write", None)):
        return "is no class with a method write(self, questions, tools): write one"
    declared = hasattr(held, "Settings")
    arguments: list[tuple[Any, list[Any], str]] = [
        (held, [None] if declared else [], "__init__(self, settings)"),
        (getattr(held, "write"), [None, [], None], "write(self, questions, tools)"),  # noqa: B009
    ]
    for function, given, signature in arguments:
        try:
            inspect.signature(function).bind(*given)
        except TypeError as error:
            return f"cannot be called as {signature}: {error}: change its parameters"
        except ValueError:  # a class without an __init__ of its own, in C
            continue
    return ""


def _written(
    expert: Any, name: str, lesson: Lesson, tools: Any
) -> tuple[list[Trace], list[Dropped]]:
    """Return what a user's expert writes as traces; what is no trace is dropped.

    Raises ValueError with the user's file for an error in it, and for what is no response.
    """
    try:
        with ending_forks():
            given = list(expert.write(list(lesson.questions), tools))
    except Exception as error:
        raise ValueError(f"{name} raises {type(error).__name__}: {error}: correct it") from error
    traces, dropped = [], []
    ids = {question.id for question in lesson.questions}
    for number, each in enumerate(given):
        trace = each if isinstance(each, Trace) else _pair(each, name, number)
        if trace.question.id not in ids:
            raise ValueError(
                f"{name} answers {trace.question.id}, which is no question that it was given"
            )
        problem = lesson.rules.trace_problem(trace.parts)
        if problem:
            dropped.append(Dropped(trace.question.id, NO_TRACE, problem))
        else:
            traces.append(trace)
    return traces, dropped


def _pair(given: Any, name: str, number: int) -> Trace:
    is_pair = isinstance(given, tuple | list) and len(given) == 2
    if not is_pair or not isinstance(given[0], Question) or not isinstance(given[1], str):
        raise ValueError(
            f"{name} returns as its trace {number} {given!r:.100}: return pairs of a question and "
            "the text of a response, or Traces (beamline.experts)"
        )
    return Trace(given[0], "none", read_parts(given[1]))

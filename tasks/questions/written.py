"""Read written traces for the cold start, and check them against gold answers and real tools."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from pydantic import model_validator

from params.schema.base import check_below_sources
from params.schema.prepare import Questions
from tasks.dialects.written_turns import answered_turns
from tasks.environments import Respond
from tasks.questions.contract import (
    ExpertKind,
    ExpertSettings,
    Lesson,
    Right,
    TraceProblem,
    Write,
)
from tasks.questions.entries import read_prompt
from tasks.questions.experts import Dropped, Parts, Trace
from tasks.questions.faults import Fault, Place, RecordError, shown, unreadable
from tasks.questions.fields import Record, text
from tasks.questions.record_files import rows
from tasks.trees.dialogue import OTHER_TAGS, final_answer, read_calls
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Message, Observation, Question

Prompt = tuple[tuple[Message, ...], str]  # the messages before, the text

LONG_TRACE = "is longer than the context"
TRACES_AT_ONCE = 256  # whose calls run side by side
CUT = "..."  # ends a result that was cut to the tokens of the dialogue
SHORTEST_CUT = 12  # characters of such a result
_RESULT = re.compile(r"(<result>.*?</result>)", re.DOTALL)
_BETWEEN = re.compile(r"</result>\s+<result>")
_ENDED = re.compile(r"(</[A-Za-z][\w-]*>)\s+\Z")
_CLOSING = re.compile(r"</([A-Za-z][\w-]*)>")
_DECIMAL = re.compile(r"[-+]?\d+\.\d+(?:e[-+]?\d+)?", re.IGNORECASE)


class WrittenTraces(ExpertSettings):
    """Whole responses to training questions, from a file of records below data/sources/."""

    file: Path
    question: str  # field
    response: str  # field
    check_calls: tuple[str, ...]  # tools whose calls are run again, to compare their results

    @model_validator(mode="after")
    def _file_is_watched(self) -> WrittenTraces:
        check_below_sources(self.file)
        return self


def write(expert: WrittenTraces, lesson: Lesson) -> tuple[Write, list[Fault]]:
    """Return a writer of the sound traces in the user's file, and the faults of the others."""
    traces, faults = read_traces(
        expert, lesson.read, lesson.rules.trace_problem, lesson.rules.longest_trace
    )
    left_out, right = lesson.left_out, lesson.rules.right
    return lambda tools: check(traces, left_out, expert.check_calls, tools, right), faults


def unknown_calls(expert: WrittenTraces, questions: Questions, tools: Sequence[str]) -> list[str]:
    """Return a line where calls are to be checked of a tool that the agent does not have."""
    missing = [tool for tool in expert.check_calls if tool not in tools]
    if not missing:
        return []
    return [
        f"prepare.expert.check_calls names {', '.join(missing)}, and tools has {list(tools)}: "
        "name only tools of the recipe, whose calls can be run"
    ]


# ---------------------------------------------------------------- reading


def read_traces(
    expert: WrittenTraces,
    questions: Sequence[Question],
    problem: TraceProblem,
    longest: int,
) -> tuple[list[Trace], list[Fault]]:
    """Read the traces of a file in their order, and the faults of the others.

    questions: of the training sets, those that are left out later included. A trace belongs to the
    question with the same messages, else to the only one with the same text. A response of more
    than ``longest`` characters is not read.
    A file that cannot be read is among the faults.
    """
    find = _finder(questions)
    traces: list[Trace] = []
    faults: list[Fault] = []
    try:
        for location, record in rows(expert.file, fields=(expert.question, expert.response)):
            if isinstance(record, Fault):
                faults.append(record)
                continue
            question = _question(record, expert.question, find, location)
            parts = _parts(record, expert.response, problem, longest, location)
            record_faults = [each for each in (question, parts) if isinstance(each, Fault)]
            faults += record_faults
            if isinstance(question, Question) and isinstance(parts, list):
                traces.append(Trace(question, "none", parts, location))
    except ValueError as error:
        faults.append(unreadable(error))
    return traces, faults


def _question(
    record: Record, field: str, find: Callable[[Prompt], list[Question]], location: Place
) -> Question | Fault:
    try:
        prompt = read_prompt(record, field, location)
    except RecordError as error:
        return error.fault
    matches = find(prompt)
    if len(matches) == 1:
        return matches[0]
    words, remedy = "is in no set of prepare.questions.train", "correct it, or drop the trace"
    if matches:
        words = "has the text of several questions with other messages before it"
        remedy = "give the whole chat"
    return Fault(location, words, remedy, field, f": {shown(prompt[1])}")


def _parts(
    record: Record, field: str, problem: TraceProblem, longest: int, location: Place
) -> Parts | Fault:
    try:
        response = text(record, field, location)
    except RecordError as error:
        return error.fault
    if len(response) > longest:
        detail = f" ({len(response):,} characters, and it has room for {longest:,} at most)"
        return Fault(location, LONG_TRACE, "shorten it, or drop the trace", field, detail)
    parts = read_parts(response)
    if words := problem(parts):
        remedy = "write it as data/sources/README.md shows, or drop the trace"
        return Fault(location, f"is no trace: {words}", remedy, field)
    return parts


def _finder(questions: Sequence[Question]) -> Callable[[Prompt], list[Question]]:
    """Return a function from a prompt to its question, or to all that have its text."""
    by_prompt: dict[Prompt, Question] = {}
    by_text: dict[str, list[Question]] = {}
    for question in questions:
        prompt = question.before, question.text
        if prompt not in by_prompt:
            by_prompt[prompt] = question
            by_text.setdefault(question.text, []).append(question)

    def find(prompt: Prompt) -> list[Question]:
        exact = by_prompt.get(prompt)
        return [exact] if exact else by_text.get(prompt[1], [])

    return find


def read_parts(response: str) -> Parts:
    """Cut a written response into (turn, True) and (tool result, False).

    Space between two results is left out: they answer the calls of one turn. So is space behind a
    call or an answer: a turn ends there, and an agent that had learned the space could never write
    it.
    """
    parts = [part for part in _RESULT.split(_BETWEEN.sub("</result><result>", response)) if part]
    cut = [_ENDED.sub(r"\1", part) for part in parts]
    return [(part, not part.startswith("<result>")) for part in cut if part]


# ---------------------------------------------------------------- checking


def check(
    traces: Sequence[Trace],
    left_out: Mapping[str, str],
    check_calls: Collection[str],
    tools: Respond,
    right: Right,
) -> tuple[list[Trace], list[Dropped]]:
    """Split traces into those to learn from, and the others with their reasons.

    left_out: question id -> why it is not trained on. check_calls: the tools whose calls are run
    again. Reasons: "trace_of_question_left_out" (``detail``: why), "wrong_answer",
    "repeated_trace" (of which), "tool_result_differs" (what the tool returned).
    """
    kept, dropped = [], []
    first: dict[tuple[str, str], Place] = {}
    for trace in traces:
        question, whole = trace.question, "".join(part for part, _ in trace.parts)
        answer = final_answer(trace.parts[-1][0]) or ""
        before = first.setdefault((question.id, whole), trace.place)
        if question.id in left_out:
            reason = Dropped(question.id, "trace_of_question_left_out", left_out[question.id])
        elif not right(question, answer):
            gold = " or ".join(question.answers)
            detail = f"{trace.place}: answers {answer}, gold {gold}"
            reason = Dropped(question.id, "wrong_answer", detail)
        elif before != trace.place:
            reason = Dropped(question.id, "repeated_trace", f"{trace.place}: as {before}")
        else:
            kept.append(trace)
            continue
        dropped.append(reason)
    differing = _differences(kept, check_calls, tools)
    sound = [trace for trace, difference in zip(kept, differing, strict=True) if not difference]
    dropped += [
        Dropped(trace.question.id, "tool_result_differs", f"{trace.place}: {difference}")
        for trace, difference in zip(kept, differing, strict=True)
        if difference
    ]
    return sound, dropped


def without_marks(
    traces: Sequence[Trace], forged: re.Pattern[str]
) -> tuple[list[Trace], list[Dropped]]:
    """Split traces into those to learn from, and those that teach to forge a turn.

    forged: finds the marks of turns of the policy's tokenizer. A tool result may quote them.
    Reason: "forged_turn", as of a rollout (``detail``: which mark).
    """
    kept, dropped = [], []
    for trace in traces:
        turns = [part for part, is_turn in trace.parts if is_turn]
        marks = [
            (number, mark[0]) for number, turn in enumerate(turns) if (mark := forged.search(turn))
        ]
        if marks:
            location = trace.place or "a scripted trace"
            detail = f"{location}: turn {marks[0][0]} has the mark {marks[0][1]}"
            dropped.append(Dropped(trace.question.id, "forged_turn", detail))
        else:
            kept.append(trace)
    return kept, dropped


def _differences(
    traces: Sequence[Trace], check_calls: Collection[str], tools: Respond
) -> list[str]:
    """Run the calls of each trace; return where a result first differs from the written, or ""."""
    differences = []
    for start in range(0, len(traces), TRACES_AT_ONCE):
        calls = [_calls(trace.parts, check_calls) for trace in traces[start:][:TRACES_AT_ONCE]]
        seen = iter(tools([call for each in calls for call, _ in each]) if any(calls) else [])
        differences += [
            _difference(each, list(itertools.islice(seen, len(each)))) for each in calls
        ]
    return differences


def _calls(parts: Parts, check_calls: Collection[str]) -> list[tuple[Call, str]]:
    """Return the calls of ``check_calls``, each with its written result."""
    pairs: list[tuple[Call, str]] = []
    for turn, results in answered_turns(parts):
        tags = _CLOSING.findall(turn) if len(results) > 1 else []  # other tools have results, too
        names = [*check_calls, *(tag for tag in tags if tag not in OTHER_TAGS)]
        pairs += zip(read_calls(turn, names), results, strict=False)
    return [(call, result) for call, result in pairs if call.tool in check_calls]


def _difference(calls: Sequence[tuple[Call, str]], seen: Sequence[Observation]) -> str:
    for (call, written), observation in zip(calls, seen, strict=True):
        if not same_result(written, observation):
            returned, stated = (shown(each.strip()) for each in (observation.text, written))
            return f"{call.tool} returns {returned}, not {stated}"
    return ""


def same_result(written: str, observation: Observation) -> bool:
    """Return whether a written result is what the tool returned.

    Space does not count, nor do decimals after the sixth; a written result may be cut. Of an error
    only the last line counts, as its path and line numbers depend on the sandbox, or the first
    where it is cut.
    """
    ours, theirs = observation.text.strip(), written.strip()
    cut = theirs.endswith(CUT) and len(theirs) >= SHORTEST_CUT
    if observation.outcome != Outcome.OK:
        line = 0 if cut else -1
        ours, theirs = (each.splitlines()[line] if each else "" for each in (ours, theirs))
        return ours.strip() == theirs.strip() or (not cut and _same_text(ours, theirs))
    if cut:
        beginning = "".join(theirs.removesuffix(CUT).split())
        return "".join(ours.split()).startswith(beginning)
    return _same_text(ours, theirs)


def _same_text(ours: str, theirs: str) -> bool:
    """Compare two texts word by word, with their decimals as numbers."""
    frames = [" ".join(_DECIMAL.sub("0.0", text).split()) for text in (ours, theirs)]
    numbers = [[float(each) for each in _DECIMAL.findall(text)] for text in (ours, theirs)]
    return frames[0] == frames[1] and all(
        math.isclose(left, right, rel_tol=1e-12, abs_tol=1e-6)
        for left, right in zip(*numbers, strict=True)
    )


EXPERT = ExpertKind(
    WrittenTraces,
    write,
    ("benchmarks",),
    faults=unknown_calls,
    files=lambda expert: [("prepare.expert.file", expert.file)],
)

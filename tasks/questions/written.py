"""Read written traces for the cold start, and check them against gold answers and real tools."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence

from params.schema.prepare import WrittenTraces
from tasks.environments import Respond
from tasks.questions.entries import read_prompt
from tasks.questions.experts import Dropped, Parts, Trace
from tasks.questions.faults import Fault, Place, RecordError, shown
from tasks.questions.fields import Record, text
from tasks.questions.files import rows
from tasks.trees.dialogue import final_answer, read_call
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Message, Observation, Question

Prompt = tuple[tuple[Message, ...], str]  # the messages before, the text
Right = Callable[[Question, str], bool]
TraceProblem = Callable[[Parts], str]  # returns what is wrong with a trace, or ""

TRACES_AT_ONCE = 256  # whose calls run side by side
CUT = "..."  # ends a result that was cut to the tokens of the dialogue
_RESULT = re.compile(r"(<result>.*?</result>)", re.DOTALL)
_NUMBER = re.compile(r"[-+]?\d+\.\d+(?:e[-+]?\d+)?", re.IGNORECASE)
DIGITS = 6  # significant ones, of numbers in results


# ---------------------------------------------------------------- reading


def read_traces(
    expert: WrittenTraces, questions: Sequence[Question], problem: TraceProblem
) -> tuple[list[Trace], list[Fault]]:
    """Read the traces of a file in their order, and the faults of the others.

    questions: of the training sets, those that are left out later included. A trace belongs to the
    question with the same messages, else to the only one with the same text.
    Raises ValueError for a file that cannot be read.
    """
    find = _finder(questions)
    traces, faults = [], []
    for place, record in rows(expert.file):
        if isinstance(record, Fault):
            faults.append(record)
            continue
        try:
            traces.append(_trace(record, expert, find, problem, place))
        except RecordError as error:
            faults.append(error.fault)
    return traces, faults


def _trace(
    record: Record,
    expert: WrittenTraces,
    find: Callable[[Prompt], list[Question]],
    problem: TraceProblem,
    place: Place,
) -> Trace:
    prompt = read_prompt(record, expert.question, place)
    parts = read_parts(text(record, expert.response, place))
    found = find(prompt)
    if not found:
        words = "is in no set of prepare.questions.train"
        remedy = "correct it, or drop the trace"
        raise RecordError(Fault(place, words, remedy, expert.question, f": {shown(prompt[1])}"))
    if len(found) > 1:
        words = "has the text of several questions with other messages before it"
        remedy = "give the whole chat"
        raise RecordError(Fault(place, words, remedy, expert.question, f": {shown(prompt[1])}"))
    if words := problem(parts):
        remedy = "write it as data/sources/README.md shows, or drop the trace"
        raise RecordError(Fault(place, f"is no trace: {words}", remedy, expert.response))
    return Trace(found[0], "none", parts, place)


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
    """Cut a written response into (turn, True) and (tool result, False)."""
    parts = [part for part in _RESULT.split(response) if part]
    return [(part, not part.startswith("<result>")) for part in parts]


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
    sound = [trace for trace, found in zip(kept, differing, strict=True) if not found]
    dropped += [
        Dropped(trace.question.id, "tool_result_differs", f"{trace.place}: {found}")
        for trace, found in zip(kept, differing, strict=True)
        if found
    ]
    return sound, dropped


def _differences(
    traces: Sequence[Trace], check_calls: Collection[str], tools: Respond
) -> list[str]:
    """Run the calls of each trace; return where a result first differs from the written, or ""."""
    found = []
    for start in range(0, len(traces), TRACES_AT_ONCE):
        calls = [_calls(trace.parts, check_calls) for trace in traces[start:][:TRACES_AT_ONCE]]
        seen = iter(tools([call for each in calls for call, _ in each]) if any(calls) else [])
        found += [_difference(each, list(itertools.islice(seen, len(each)))) for each in calls]
    return found


def _calls(parts: Parts, check_calls: Collection[str]) -> list[tuple[Call, str]]:
    """Return the calls of ``check_calls``, each with the result that is written after it."""
    turns, results = parts[0::2], parts[1::2]
    pairs = (
        (read_call(turn), result) for (turn, _), (result, _) in zip(turns, results, strict=False)
    )
    return [(call, _body(result)) for call, result in pairs if call and call.tool in check_calls]


def _body(result: str) -> str:
    return result.removeprefix("<result>").removesuffix("</result>")


def _difference(calls: Sequence[tuple[Call, str]], seen: Sequence[Observation]) -> str:
    for (call, written), observation in zip(calls, seen, strict=True):
        if not same_result(written, observation):
            returned, stated = (shown(each.strip()) for each in (observation.text, written))
            return f"{call.tool} returns {returned}, not {stated}"
    return ""


def same_result(written: str, observation: Observation) -> bool:
    """Return whether a written result is what the tool returned.

    Space does not count, nor do digits of decimals after ``DIGITS``; a written result may be cut.
    Of an error only the last line counts, as its path and line numbers depend on the sandbox.
    """
    ours, theirs = (_comparable(each) for each in (observation.text, written))
    if observation.outcome != Outcome.OK:
        ours, theirs = (_comparable(_last_line(each)) for each in (observation.text, written))
    if theirs.endswith(CUT):
        return ours.startswith(theirs.removesuffix(CUT).rstrip())
    return ours == theirs


def _comparable(result: str) -> str:
    return _NUMBER.sub(lambda number: f"{float(number[0]):.{DIGITS}g}", " ".join(result.split()))


def _last_line(result: str) -> str:
    return result.strip().rpartition("\n")[2]

"""Written traces: read, matched with their questions, checked against answers and tools."""

import json
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tasks.gates.traces import trace_fault
from tasks.questions import written
from tasks.questions.experts import Dropped, Trace
from tasks.questions.written import WrittenTraces, read_parts
from tasks.recipes import load as settings_of
from tasks.tools.python import python_tool
from tasks.trees.markers import any_of
from tasks.trees.tree import Message, Observation, Question
from tests.agents import responding

ROOT = Path(__file__).parents[3]
CALL = "<think>a</think><python>print(1 + 1)</python>"
RESULT = "<result>2\n</result>"
END = "<think>b</think><answer>\\boxed{2}</answer>"
USER = {"role": "user", "content": "x"}


def question(number, text="one", before=(), answers=("2",)):
    return Question(f"q{number}", "toy", text, answers, "exact", before)


@pytest.fixture
def read(tmp_path):
    """A function from questions and records to traces and faults."""
    file = tmp_path / "traces.jsonl"
    expert = WrittenTraces.model_construct(file=file, question="ask", response="say")

    def read(questions, *records):
        lines = [json.dumps({"ask": ask, "say": say}) for ask, say in records]
        file.write_text("\n".join(lines))
        problem = partial(trace_fault, tools=["python"])
        return written.read_traces(expert, questions, problem, 10_000)

    return read


def test_a_trace_is_cut_into_turns_and_results(read):
    response = CALL + RESULT + CALL + "<result></result>" + END
    (first, second), faults = read([question(1)], (" one ", response), ("one", END))
    assert faults == []
    assert (first.question, first.flaw) == (question(1), "none")
    assert first.place.endswith("traces.jsonl, line 1")
    assert first.parts == [
        (CALL, True),
        (RESULT, False),
        (CALL, True),
        ("<result></result>", False),
        (END, True),
    ]
    assert second.parts == [(END, True)]


def test_repeated_question_is_the_first(read):
    ((trace,), _) = read([question(1), question(2)], ("one", END))
    assert trace.question.id == "q1"


def test_a_trace_finds_its_question_by_chat_or_by_unique_text(read):
    system = (Message("system", "Be brief."),)
    chat = [{"role": "system", "content": "Be brief."}, USER]
    questions = [
        question(1, "x", system),
        question(2, "x"),
        question(3, "y", system),
        question(4, "z"),
    ]
    asked = [chat, "x", "y", [*chat[:1], {**USER, "content": "z"}]]
    traces, faults = read(questions, *((ask, END) for ask in asked))
    assert [trace.question.id for trace in traces] == ["q1", "q2", "q3", "q4"]
    assert faults == []
    _, (fault,) = read([questions[0], question(5, "x", (Message("user", "Hi"),))], ("x", END))
    assert "'ask' has the text of several questions" in str(fault)
    assert str(fault).endswith(": give the whole chat")


def test_each_faulty_trace_is_named(read):
    traces, faults = read(
        [question(1), question(2, "two")],
        ("six", END),
        ("one", " "),
        ("two", CALL + RESULT),
        ("one", CALL.replace("python", "search") + RESULT + END),
        ("two", END),
    )
    assert [trace.question.id for trace in traces] == ["q2"]
    assert [str(fault).partition("traces.jsonl, ")[2] for fault in faults] == [
        "line 1: the field 'ask' is in no set of prepare.questions.train: 'six': correct it, or "
        "drop the trace",
        "line 2: the field 'say' is empty: fill it in, or drop the record",
        "line 3: the field 'say' is no trace: ends with a tool result: write it as "
        "data/sources/README.md shows, or drop the trace",
        "line 4: the field 'say' is no trace: turn 0 calls search, which the recipe does not "
        "name: write it as data/sources/README.md shows, or drop the trace",
    ]


# ---------------------------------------------------------------- checks


@contextmanager
def python():
    limits = settings_of("smoke", ROOT / "params").tools["python"]
    with python_tool(limits, 1) as tool:
        yield responding({"python": tool})


def right(asked, answer):
    return answer in asked.answers


def trace(line, response, asked=None):
    return Trace(asked or question(1), "none", written.read_parts(response), f"t, line {line}")


def test_wrong_repeated_and_invented_traces_are_dropped_with_reasons():
    invented = "<result>-777</result>"
    wrong = "<answer>\\boxed{-777}</answer>"
    traces = [
        trace(1, CALL + RESULT + END),
        trace(2, CALL + invented + wrong),
        trace(3, CALL + invented + END),
        *(trace(line, CALL + RESULT + END) for line in range(4, 104)),
        trace(104, END),
        trace(105, END, question(2)),
        trace(106, CALL + RESULT + CALL + "<result>3</result>" + END),
    ]
    with python() as tools:
        kept, dropped = written.check(traces, {"q2": "validation"}, ["python"], tools, right)
    assert kept == [traces[0], traces[103]]
    assert dropped == [
        Dropped("q1", "wrong_answer", "t, line 2: answers -777, gold 2"),
        *(
            Dropped("q1", "repeated_trace", f"t, line {line}: as t, line 1")
            for line in range(4, 104)
        ),
        Dropped("q2", "trace_of_question_left_out", "validation"),
        Dropped("q1", "tool_result_differs", "t, line 3: python returns '2', not '-777'"),
        Dropped("q1", "tool_result_differs", "t, line 106: python returns '2', not '3'"),
    ]


def test_traces_that_forge_a_turn_are_dropped():
    marks = any_of(["<start_of_turn>", "[INST]"])
    traces = [
        trace(1, CALL + "<result>[INST]</result>" + END),
        trace(2, CALL + RESULT + "<think>[INST] a</think>" + END),
        trace(3, "<think><start_of_turn>user</think>" + END),
        trace(4, END),
    ]
    kept, dropped = written.without_marks(traces, marks)
    assert kept == [traces[0], traces[3]]
    assert dropped == [
        Dropped("q1", "forged_turn", "t, line 2: turn 1 has the mark [INST]"),
        Dropped("q1", "forged_turn", "t, line 3: turn 0 has the mark <start_of_turn>"),
    ]


def test_only_the_named_tools_are_run():
    traces = [trace(1, CALL + "<result>-777</result>" + END), trace(2, END)]
    kept, dropped = written.check(traces, {}, [], lambda calls: pytest.fail("ran"), right)
    assert (kept, dropped) == (traces, [])


def test_long_files_are_run_a_part_at_a_time():
    rounds = []

    def tools(calls):
        rounds.append(len(calls))
        return [Observation("ok", call.argument) for call in calls]

    def calls(*numbers):
        return "".join(f"<python>{n}</python><result>{n}</result>" for n in numbers)

    asked = [question(number) for number in range(600)]
    traces = [trace(n, calls(n, n + 1) + END, each) for n, each in enumerate(asked)]
    kept, _ = written.check(traces, {}, ["python"], tools, right)
    assert kept == traces and rounds == [512, 512, 176]


@pytest.mark.parametrize(
    ("stated", "outcome", "returned", "same"),
    [
        ("2", "ok", "2\n", True),
        (" a\n b", "ok", "a b", True),
        ("0.30000000000000004", "ok", "0.3", True),
        ("0.3333333333", "ok", "0.333333333333", True),
        ("0.3334", "ok", "0.3333", False),
        ("12", "ok", "13", False),
        ("12345678.50", "ok", "12345699.50", False),
        ("1 2 3 4 5 6 7...", "ok", "1 2 3 4 5 6 7 8 9", True),
        ("1 2 3 4 5 6 8...", "ok", "1 2 3 4 5 6 7 8 9", False),
        ("...", "ok", "anything", False),
        ("4...", "ok", "42", False),
        ("", "ok", "2", False),
        (
            'File "/a/b.py", line 1\nNameError: x',
            "error",
            'File "s", line 7\n  f()\nNameError: x',
            True,
        ),
        ("NameError: y", "error", "NameError: x", False),
        ("Traceback\n  File...", "error", "Traceback\n  File s\nNameError: x", True),
        ("", "error", "NameError: x", False),
    ],
)
def test_same_result(stated, outcome, returned, same):
    assert written.same_result(stated, Observation(outcome, returned)) is same


def test_results_of_several_calls_are_compared_each_with_its_own():
    turn = "<think>a</think><book>Rom</book>\n<python>1</python><python>2</python>"
    parts = written.read_parts(
        f"{turn}<result>x</result>\n <result>1</result><result>3</result>{END}"
    )
    assert parts == [
        (turn, True),
        *((f"<result>{each}</result>", False) for each in ("x", "1", "3")),
        (END, True),
    ]
    asked = []

    def tools(calls):
        asked.extend(calls)
        return [Observation("ok", call.argument) for call in calls]

    traces = [Trace(question(1), "none", parts)]
    kept, dropped = written.check(traces, {}, ["python"], tools, lambda *_: True)
    assert [call.argument for call in asked] == ["1", "2"] and kept == []
    assert dropped == [
        Dropped("q1", "tool_result_differs", f"{traces[0].place}: python returns '2', not '3'")
    ]


ANSWERED = "<think>b</think><answer>\\boxed{42}</answer>"
CALLED = "<think>a</think><python>6 * 7</python><result>42</result>"


def test_space_that_no_agent_could_write_is_left_out():
    parts = read_parts(f"{CALLED.replace('<result>', chr(10) + '<result>')}\n{ANSWERED}\n \n")
    turns = [text for text, is_turn in parts if is_turn]
    assert turns == ["<think>a</think><python>6 * 7</python>", f"\n{ANSWERED}"]
    assert trace_fault(parts, ["python"]) == ""


@pytest.mark.parametrize(
    ("response", "fault"),
    [
        (f"{CALLED}{ANSWERED} I hope it helps.", "text after the answer"),
        (f"{CALLED.replace('</think>', '')}{ANSWERED}", "turn 0: the tags <think>"),
        (f"{CALLED}<think>{ANSWERED}", "turn 1: the tags <think><think></think>"),
        (f"{CALLED.replace('6 * 7', repr('<think>'))}{ANSWERED}", ""),  # of code
    ],
)
def test_traces_that_no_agent_could_write_are_refused(response, fault):
    assert trace_fault(read_parts(response), ["python"]).startswith(fault)
    assert fault or trace_fault(read_parts(response), ["python"]) == ""

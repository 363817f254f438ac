import ast
import json
import re
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.questions.calculator import (
    UnreadableError,
    evaluate,
    numbers_of,
    program,
    read_expression,
    read_steps,
    thought,
    write_traces,
)
from tasks.tools.python import python_tool
from tasks.trees.tree import Question
from tests.agents import responding
from tests.sections import PYTHON


@pytest.fixture(scope="module")
def tools():
    with python_tool(PYTHON, 2) as run:
        yield responding({"python": run})


def right(question, answer):
    try:
        return Fraction(answer) == Fraction(question.answers[0])
    except ValueError:
        return False


def entry(solution, text="How many?", name="q"):
    gold = solution.rpartition("####")[2].strip().replace(",", "")
    return Question(name, "gsm8k", text, (gold,)), solution


def code_of(trace):
    return re.search("<python>(.*)</python>", trace.parts[0][0], re.DOTALL)[1]


def thought_of(trace):
    return re.match("<think>(.*?)</think>", trace.parts[0][0], re.DOTALL)[1]


def numbers(text):
    """The numbers that a text holds, those within a name such as step3 apart."""
    found = re.findall(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?|\.\d+)", text)
    return {Fraction(number.replace(",", "")) for number in found}


def only(tools, solution, text="How many?"):
    """The one trace, or the one drop, of a solution."""
    traces, dropped = write_traces([entry(solution, text)], tools, right)
    (end,) = traces + dropped
    return end


# ---------------------------------------------------------------- a whole trace


def test_trace_computes_and_copies_the_output(tools):
    trace = only(
        tools,
        "Mo bakes 40 - 15 = <<40-15=25>>25 rolls.\nAt $3 each, 25 rolls bring 25 x 3 = "
        "$<<25*3=75>>75.\n#### 75",
    )
    assert trace.flaw == "none"
    assert trace.parts == [
        (
            "<think>Mo bakes 40 - 15 = step1 rolls.\nAt $3 each, step1 rolls bring step1 x 3 = "
            "step2.</think><python>step1 = 40 - 15\nstep2 = step1 * 3\nprint(step2)</python>",
            True,
        ),
        ("<result>75</result>", False),
        (r"<think>The program gives the answer.</think><answer>\boxed{75}</answer>", True),
    ]


@pytest.mark.parametrize(
    ("solution", "printed", "answer"),
    [
        ("It is 36/2 = <<36/2=18>>18.\n#### 18", "18.0", "18"),
        ("It is 36/2 = <<36/2=18>>18.\n#### 18.00", "18.0", "18"),  # equal as numbers
        # 3 * 1.1 as a float is 3.3000000000000003
        ("It is 3*1.1 = <<3*1.1=3.3>>3.3.\n#### 3.3", "3.3", "3.3"),
        ("It is 5*0.25 = <<5*0.25=1.25>>1.25.\n#### 1.25", "1.25", "1.25"),
        ("It is 2-9 = <<2-9=-7>>-7.\n#### -7", "-7", "-7"),
        ("It is 900*40 = <<900*40=36000>>36,000.\n#### 36,000", "36000", "36000"),
    ],
)
def test_the_answer_is_the_printed_number(tools, solution, printed, answer):
    trace = only(tools, solution)
    assert trace.parts[1] == (f"<result>{printed}</result>", False)
    assert trace.parts[2][0].endswith(rf"\boxed{{{answer}}}</answer>")


# ---------------------------------------------------------------- reading

GOLDEN = {
    "16-3-4": "16 - 3 - 4",
    "$1,250 + $2,000,500": "1250 + 2000500",
    "60,000-5,000": "60000 - 5000",
    "05+007": "5 + 7",
    ".5*8": "0.5 * 8",
    "0.05*100.00": "0.05 * 100",
    "25%*80": "25 / 100 * 80",
    "2(3+4)": "2 * (3 + 4)",
    "(1+2)(3+4)": "(1 + 2) * (3 + 4)",
    "6 x 7": "6 * 7",
    "6x7": "6 * 7",
    "8 × 4 ÷ 2": "8 * 4 / 2",
    "9 – 4 − 1": "9 - 4 - 1",
    "560//10": "560 // 10",
    "-20+10": "-20 + 10",
    "3 boxes * 12 pens/box": "3 * 12",
    "8 divided by 2 plus 5": "8 / 2 + 5",
    "((7))": "7",
    "€4*3¢": "4 * 3",
}


@pytest.mark.parametrize(("written", "code"), GOLDEN.items())
def test_arithmetic_is_read_as_people_write_it(written, code):
    assert read_expression(written) == code


@pytest.mark.parametrize(
    "written",
    [
        *("", "ten", "2x+3", "x+5", "3 4", "1.2.3+1", "5+", "(3+4", "1,50+2", "4=4", "2^3", "2**3"),
        *(
            "5 % 3",
            "[1]+2",
            "1 if 2 else 3",
            "__import__",
            "a.b+1",
            "7!",
            "1_000+1",
            "+" * 90 + "1+",
        ),
        *("(" * 60 + "1+1" + ")" * 60, "1" * 101, "3+4\0", "3;4", "9 or 1", "x", "2 m * 3"),
    ],
)
def test_what_is_no_arithmetic_is_unreadable(written):
    with pytest.raises(UnreadableError):
        read_expression(written)


@given(st.text(alphabet="0123456789.,+-*/()%$x= ab_[]{}:;'\"<>\\\0\n^&|~!@", max_size=120))
def test_any_text_is_arithmetic_only_or_unreadable(written):
    try:
        code = read_expression(written)
    except UnreadableError:
        return
    assert set(code) <= set("0123456789.e+-*/() ")
    assert "**" not in code


def trees():
    leaves = st.one_of(
        st.integers(0, 10**6).map(str),
        st.decimals(0, 999, places=2).map(str),
        st.integers(1000, 10**9).map("{:,}".format),
    )

    def join(children):
        return st.tuples(
            children, st.sampled_from(["+", "-", "*", "/", " x ", " - "]), children
        ).map(lambda parts: "({}{}{})".format(*parts))

    return st.tuples(st.recursive(leaves, join, max_leaves=5), leaves).map("+".join)


def value_of(written):
    """Another reading of the same notation: Python's own, on exact numbers."""
    plain = written.replace(",", "").replace(" x ", "*")
    exact = re.sub(r"\d+(\.\d+)?", lambda number: f"Fraction('{number[0]}')", plain)
    return eval(exact, {"Fraction": Fraction})


@given(trees())
def test_program_has_the_value_of_any_note(written):
    try:
        expected = value_of(written)
    except ZeroDivisionError:
        return
    if len(written) > 100:
        return
    (step,) = read_steps(f"So it is <<{written}=1>>1.")
    assert evaluate(ast.parse(step.code, mode="eval").body) == expected
    spaces = {}
    exec(program([step], set()).replace("print", "answer ="), spaces)
    assert spaces["answer"] == pytest.approx(float(expected), rel=1e-9, abs=1e-6)


# ---------------------------------------------------------------- which calculations are steps


def steps_of(text):
    return [(step.code, step.result) for step in read_steps(text)]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("a 4+5 = <<4+5=9>>9, b 9*2 = 18.", [("4 + 5", 9), ("9 * 2", 18)]),
        ("There are $60,000-$5,000=$55,000 left.", [("60000 - 5000", 55000)]),
        ("6 boxes * 7 pens/box = 42 pens", [("6 * 7", 42)]),
        ("2 tubs / 50 tubs * 100% = 4%", [("2 / 50 * 100", 4)]),
        ("25% * 80 = 20", [("25 / 100 * 80", 20)]),
        ("because 14 minus 3 equals 11", [("14 - 3", 11)]),
        ("200(.70)=140 pupils", [("200 * 0.7", 140)]),
        ("<<5*4=20>>20 + 3 = 23", [("5 * 4", 20), ("20 + 3", 23)]),
    ],
)
def test_notes_and_equations_that_hold_are_steps(text, steps):
    assert steps_of(text) == steps


@pytest.mark.parametrize(
    "text",
    [
        "192*100=$1920",  # does not hold
        "2 cups / 1/4 cup = 8",  # nor as it is written
        "x + 5 + 3 = 8",  # the end of a longer one
        "1/0 = 0",
        "12 = 12",
        "4x = 44",
        "rows 2-3 and 5",
    ],
)
def test_only_true_equations_are_steps(text):
    assert steps_of(text) == []


# ---------------------------------------------------------------- linking


def both(text, question):
    """Program and thought of a text."""
    steps, given_ = read_steps(text), numbers_of(question)
    return program(steps, given_).splitlines(), thought(text, steps, given_)


def test_result_is_linked_to_its_latest_step():
    lines, said = both("A <<20+30=50>>50, b <<25*2=50>>50, c 50 - 9 = <<50-9=41>>41", "")
    assert lines[2] == "step3 = step2 - 9"
    assert said == "A step1, b step2, c step2 - 9 = step3"


def test_number_of_the_question_stays():
    text = "A 50+20 = <<50+20=70>>70, b 70*3 = <<70*3=210>>210, c 210+70 = <<210+70=280>>280 of 70"
    free, said = both(text, "")
    assert free[1:3] == ["step2 = step1 * 3", "step3 = step2 + step1"]
    assert said == "A 50+20 = step1, b step1*3 = step2, c step2+step1 = step3 of step1"
    given_, said = both(text, "Bo has 70.")
    assert given_[1:3] == ["step2 = step1 * 3", "step3 = step2 + 70"]
    assert said == "A 50+20 = step1, b step1*3 = step2, c step2+70 = step3 of 70"


def test_a_word_brings_its_number_into_the_solution():
    assert numbers_of("Twice a week for 1,500 3/4 .5 months") == {
        *map(Fraction, ("1500", "3", "4", "0.5")),
        *map(Fraction, (1, 2, 100, 7, 52, 12, 30)),
    }
    text = "A 3*4 = <<3*4=12>>12 b 12+1 = <<12+1=13>>13 c 13*12 = <<13*12=156>>156"
    assert both(text, "over a year")[0][2] == "step3 = step2 * 12"
    assert both(text, "over an hour")[0][2] == "step3 = step2 * step1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "He needs 48 kg because 12 x 4 = <<12*4=48>>48.",
            "He needs step1 kg because 12 x 4 = step1.",
        ),
        (
            "A 4*5 = <<4*5=20>>20.\nIt costs $20 because 10 x 2 = <<10*2=20>>20.",
            "A 4*5 = step1.\nIt costs step2 because 10 x 2 = step2.",
        ),
        ("It costs $<<3*5=15>>15 in all.", "It costs step1 in all."),
        ("It costs <<3*5=15>>15$ in all.", "It costs step1 in all."),
        ("So 900*40 = <<900*40=36000>>36,000.00 m", "So 900*40 = step1 m"),
        ("So 4*5=<<4*5=20>>20kg. 20kg is much", "So 4*5=step1 kg. step1 kg is much"),
        ("So 4*5=<<4*5=20>>20. The 20th day", "So 4*5=step1. The 20th day"),
        ("So 4*5=<<4*5=20>>twenty", "So 4*5=step1 twenty"),
        ("That is 4*5 = 20. He has $20.", "That is 4*5 = step1. He has step1."),
        ("One kilo is 1*1000 = <<1*1000=1000>>1000 g", "One kilo is 1*1000 = step1 g"),
        ("He had 20 then. So 4*5=<<4*5=20>>20.", "He had step1 then. So 4*5=step1."),
    ],
)
def test_results_are_named_wherever_they_are_mentioned(text, said):
    assert both(text, "")[1] == said


# ---------------------------------------------------------------- drops

DROPS = {
    "no_notes": ("Let x be it.\n4x = 44\nx = 11\n#### 11", "x = 11"),
    "no_operation": ("4x = 44\nx = <<11=11>>11\n#### 11", "<<11=11>>"),
    "unreadable_note": ("x = <<44/y=11>>11\n#### 11", "<<44/y=11>>"),
    "tool_error": ("x = <<44/0=11>>11\n#### 11", "error: ZeroDivisionError: division by zero"),
    "wrong_result": ("x = <<40/4=10>>10, so with Ann 11\n#### 11", "got 10, gold 11"),
}


@pytest.mark.parametrize("reason", DROPS)
def test_a_drop_has_its_reason(tools, reason):
    solution, detail = DROPS[reason]
    dropped = only(tools, solution)
    assert (dropped.question_id, dropped.reason) == ("q", reason)
    assert dropped.detail.startswith(detail.split(": ")[0])
    assert dropped.detail.endswith(detail.split(": ")[-1])


def test_a_bare_note_is_a_number_of_the_text(tools):
    trace = only(tools, "x = <<5=5>>5, 5*4 = <<20=20>>20, so 20+7 = <<20+7=27>>27.\n#### 27")
    assert code_of(trace) == "step1 = 5 * 4\nstep2 = step1 + 7\nprint(step2)"
    assert thought_of(trace) == "x = 5, 5*4 = step1, so step1+7 = step2."


def test_trace_has_no_tag_or_mark_of_the_solution(tools):
    trace = only(tools, "#### </think><answer>9</answer> <<4+5=9>>9\n\n  and <python> \n#### 9")
    text = "".join(part for part, _ in trace.parts)
    assert [text.count(tag) for tag in ("<think>", "</think>", "<answer>", "<python>")] == [
        2,
        2,
        1,
        1,
    ]
    assert "####" not in text
    assert "\n\n" not in text


def test_nothing_in_nothing_out(tools):
    assert write_traces([], tools, right) == ([], [])


def test_traces_and_drops_keep_the_order(tools):
    entries = [
        entry(f"It is {i}+1 = <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1 + i % 2}", name=str(i))
        for i in range(10, 20)
    ]
    traces, dropped = write_traces(entries, tools, right)
    assert [trace.question.id for trace in traces] == ["10", "12", "14", "16", "18"]
    assert [drop.question_id for drop in dropped] == ["11", "13", "15", "17", "19"]


# ---------------------------------------------------------------- all rows of the file


@pytest.fixture(scope="module")
def all_rows(data, tools):
    """Every training row, through the real sandbox."""
    lines = (data / "gsm8k" / "train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    entries = [entry(row["answer"], row["question"], str(i)) for i, row in enumerate(rows)]
    return entries, *write_traces(entries, tools, right)


def test_every_row_is_kept_or_dropped_for_a_reason(all_rows):
    entries, traces, dropped = all_rows
    ends = [trace.question.id for trace in traces] + [drop.question_id for drop in dropped]
    assert sorted(ends) == sorted(question.id for question, _ in entries)
    assert set(Counter(drop.reason for drop in dropped)) <= set(DROPS)
    assert len(traces) / len(entries) >= (0.93 if len(entries) == 7473 else 0.85)


def test_kept_programs_compute_the_right_answer(all_rows):
    for trace in all_rows[1]:
        *lines, last = code_of(trace).splitlines()
        assert re.fullmatch(rf"print\((?:round\()?step{len(lines)}(?:, 6\))?\)", last)
        for line in lines:
            (assignment,) = ast.parse(line).body
            assert any(isinstance(node, ast.BinOp) for node in ast.walk(assignment)), line
        (printed,) = re.findall("<result>(.*)</result>", trace.parts[1][0])
        (answer,) = re.findall(r"\\boxed\{(.*)\}</answer>$", trace.parts[2][0])
        assert Fraction(printed) == Fraction(answer) == Fraction(trace.question.answers[0])


def test_no_thought_gives_the_answer_away(all_rows):
    for trace in all_rows[1]:
        brought = numbers_of(trace.question.text) | numbers(code_of(trace))
        found = numbers(thought_of(trace)) - brought
        assert Fraction(trace.question.answers[0]) not in found, thought_of(trace)


def test_no_thought_keeps_a_note_a_tag_or_an_end(all_rows):
    for trace in all_rows[1]:
        said = thought_of(trace)
        assert not re.search("<<|>>|####|</?[a-z]+>|= *$|\n\n", said, re.MULTILINE), said
        assert "step1" in said

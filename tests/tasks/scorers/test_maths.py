"""The mathematics scorer: what equals what, and answers that are meant to do harm."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.scorers.complexity import too_complex
from tasks.scorers.maths import LIMITS, VERIFIER, WORKER, Verifier, budgeted, mathematics, number
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]


def judged(answer, *accepted, by=VERIFIER):
    """Return the score, and what decided it."""
    breakdown = dict(mathematics(answer, accepted, by.compare))
    score = breakdown.pop("score")
    ((decided, one),) = breakdown.items()
    assert one == 1.0
    return score, decided


# ---- decided here


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        ("18", "18", 1),
        (" \\frac{ 1 }{2}\n", "\\frac{1}{2}", 1),
        ("p - q", "p-q", 1),
        ("\ud800", "\ud800", 1),
        ("x" * 5000, "x" * 5000, 1),
        ("18.", "18", 1),
        ("$18", "18", 1),
        ("-$5", "-5", 1),
        ("25%", "25\\%", 1),
        ("the answer is $5$", "5", 1),
        ("\u200f5", "5", 1),
        *(("½", "\\frac12", 1), ("90°", "90^{\\circ}", 1), ("x<3", "(-\\infty,3)", 1)),
        *(("Evelyn", "\\text{Evelyn}", 1), ("west", "\\text{east}", 0), ("listen", "silent", 0)),
        *(("D.", "(D)", 1), ("D", "C", 0), ("true", "True", 1), ("nothing", "5", 0)),
        *(("\\{1,2\\}", "(1,2)", 0), ("(1,2)", "\\{1,2\\}", 0)),
        *(("101_2", "101_3", 0), ("1,2", "(1,2)", 0), ("[0,1)", "(0,1)", 0), ("3:2", "2:3", 0)),
        *(("", "5", 0), ("\n\n", "5", 0), ("$$", "5", 0)),
    ],
)
def test_equal_text(answer, gold, score):
    assert judged(answer, gold) == (score, "text")


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        ("5600", "5,600", 1),
        ("1,234,567", "1234567", 1),
        ("18.00", "18", 1),
        ("\\$18.50", "18.5", 1),
        ("1.5e3", "1500", 1),
        *(("1\\frac{1}{2}", "\\frac{3}{2}", 1), ("1 1/2", "11/2", 0), ("-1 1/2", "-0.5", 0)),
        *(("0.1\\overline{6}", "1/6", 1), ("1\\,234", "1234", 1), ("5 \\text{ cm}^2", "5.0", 1)),
        ("007", "7", 1),
        (".5", "1/2", 1),
        ("\\frac{1}{2}", "0.5", 1),
        ("\\dfrac{-3}{6}", "-1/2", 1),
        ("25\\%", "25", 1),
        ("25%", "0.25", 1),
        ("0.25", "25%", 1),
        ("50%", "0.5%", 0),
        ("19", "18", 0),
        ("-18", "18", 0),
        ("18.000001", "18", 0),
        ("0.333333", "1/3", 0),
        ("3333333333333333333333", "3333333333333333333334", 0),
    ],
)
def test_numbers_are_compared_exactly(answer, gold, score):
    assert judged(answer, gold) == (score, "number")


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        # a decimal is the other number rounded or cut off, from seven digits on
        *(("0.3333333", "1/3", 1), ("0.333333", "1/3", 0), ("0.6666667", "2/3", 1)),
        *(
            ("0.6666666", "2/3", 1),
            ("0.6666668", "2/3", 0),
            ("0.3333334", "1/3", 0),
            ("-0.6666667", "-2/3", 1),
        ),
        *(("-0.6666667", "2/3", 0), ("1/3", "0.3333333", 1), ("1/3", "0.333333", 0)),
        *(("3.1415927", "3.14159265", 1), ("3.14159265", "3.1415927", 1)),
        *(("33.3333333%", "1/3", 1), ("33.33333%", "1/3", 1), ("33.3333%", "1/3", 0)),
        *(("66.66667", "66\\frac{2}{3}\\%", 1), ("16.67", "50/3", 0)),
        # a fraction, and a number without decimals, is exact
        *(("3333333333/10000000000", "1/3", 0), ("33333333", "100000000/3", 0)),
        *(("1.2345679e8", "123456789", 0), ("1.23456789e8", "123456789", 1)),
        *(("123456788.9", "123456789", 0), ("9007199254740992.0", "9007199254740993", 0)),
        # a float has a rounding error
        *(("0.30000000000000004", "0.3", 1), ("2.9999999999999996", "3", 1)),
        *(("2.99999999999", "3", 0), ("3.0000000000001", "3", 0)),
        # beside 0 there is no ratio: a float's error is 0, and a number that is written out is not
        *(("1.2246e-16", "0", 1), ("-1.2246467991473532e-16", "0", 1), ("0", "1.2246e-16", 1)),
        *(("1e-16", "0", 0), ("1.22e-13", "0", 0), ("1/10000000000000000", "0", 0)),
        *(("0.000", "0", 1), ("1e-300", "2e-300", 0), ("1e-300", "1.0e-300", 1)),
    ],
)
def test_rule_of_decimals(answer, gold, score):
    assert judged(answer, gold)[0] == score


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        *(("7.071068", "5\\sqrt2", 1), ("7.07107", "5\\sqrt2", 0), ("7.071069", "5\\sqrt2", 0)),
        *(("1.584962500721156", "\\log_2 3", 1), ("1.58496", "\\log_2 3", 0)),
        *(("(0.3333333, 1)", "(\\frac13,1)", 1), ("(0.333333, 1)", "(\\frac13,1)", 0)),
        *(("0.3333333x+1", "\\frac{x}{3}+1", 1), ("0.333333x+1", "\\frac{x}{3}+1", 0)),
        *(
            ("0.5+0.8660254i", "\\frac{1+\\sqrt3 i}{2}", 1),
            ("0.5+0.866i", "\\frac{1+\\sqrt3 i}{2}", 0),
        ),
        ("1+1.2246467991473532e-16i", "1", 1),
        *(("\\frac{1}{1006!}", "\\frac{1}{1004!}", 0), ("1/20!", "1/19!", 0)),
        *(("2\\times10^{-19}", "3\\times10^{-19}", 0), ("10^{-20}", "0", 0), ("0", "10^{-20}", 0)),
        *(("\\sin(\\pi)", "0", 1), ("\\sqrt2+\\sqrt3-\\sqrt{5+2\\sqrt6}", "0", 1)),
        ("\\frac{1}{500!}x", "\\frac{1}{499!}x", 0),
    ],
)
def test_rule_of_decimals_holds_in_formulas(answer, gold, score):
    assert judged(answer, gold) == (score, "verifier")


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(7, 30))
def test_rounded_number_is_the_number(above, below, digits):
    exact = Fraction(above, below)
    with localcontext() as context:
        context.prec = digits
        rounded = format(Decimal(above) / Decimal(below), "f")
    places = len(rounded.partition(".")[2])
    score = judged(rounded, f"{above}/{below}")[0]
    if Fraction(rounded) != exact:
        significant = rounded.replace(".", "").strip("0")
        assert score == (len(significant) >= 7 and Fraction(rounded).denominator > 1)
        wrong = f"{float(Fraction(rounded) + Fraction(2, 10**places)):.{places}f}"
        if len(significant) < 15 and not wrong.endswith("0"):  # zeros at the end do not count
            assert judged(wrong, f"{above}/{below}")[0] == 0
    else:
        assert score == 1


def test_small_floats_are_compared_by_ratio():
    assert judged("1.23456789012345e-19", "1.2345678901234567e-19")[0] == 1
    assert judged("2.23456789012345e-19", "1.2345678901234567e-19")[0] == 0


def test_numbers_in_words_take_part_in_no_other():
    values = {"2.5 million": "2500000", "2 dozen": "24", "2 thirds": "2/3", "2万": "20000"}
    assert [judged(answer, gold)[0] for answer, gold in values.items()] == [1] * 4
    for answer in ("2.5 million", "2 dozen", "2 thirds", "2万"):
        assert judged(answer, answer.rstrip("万").split()[0])[0] == 0
    for answer in ("twelve", "12 000", "2.5 million", "三", "12,34,567", "three hundred and two"):
        assert judged(answer, "2")[0] == 0


@pytest.mark.parametrize("text", ["1/0", "1,23", "1e999999999", "1 2", "x", "", "--1", "½"])
def test_text_that_is_no_plain_number(text):
    assert number(text) is None


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_number_in_every_notation(above, below):
    integer, fraction = (Fraction(above), False), (Fraction(above, below), False)
    assert number(f"{above}") == number(f"{above:,}") == number(f"{above}.0") == integer
    assert number(f"{above}/{below}") == number(f"\\frac{{{above}}}{{{below}}}") == fraction
    assert judged(f"{above:,}", f"{above}/1") == (1, "number")
    assert judged(f"{above}", f"{above + below}") == (0, "number")


def test_units_are_compared_as_units():
    assert judged("5 cm", "5 m") == (0, "unit")
    assert judged("36 square inches", "36\\text{ in}^2") == (1, "text")
    assert judged("60%", "60^\\circ") == (0, "unit")
    assert judged("15 apples", "15") == (1, "text")


def test_the_first_accepted_form_ends_the_comparison():
    asked = []

    def compare(answer, gold):
        asked.append(gold)
        return VERIFIER.compare(answer, gold)

    forms = ["1+x", *(f"x+{n}" for n in range(2, 50))]
    assert mathematics("x+1", forms, compare) == {"score": 1.0, "verifier": 1.0}
    assert asked == ["1+x"]


def test_any_accepted_form_will_do():
    assert judged("5", "4", "5.0") == (1, "number")
    assert judged("5", "4", "6") == (0, "number")
    assert mathematics("5", [])["score"] == 0


# ---- decided by math-verify


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        ("\\sqrt{12}", "2\\sqrt{3}", 1),
        ("(x+1)^2", "x^2+2x+1", 1),
        ("q-p", "p-q", 0),
        ("\\sqrt{3}", "\\sqrt{2}", 0),
        ("x=5", "5", 1),
        ("\\sin 30^\\circ", "\\frac{1}{2}", 1),
        ("2,1", "1,2", 1),
        ("(2,1)", "(1,2)", 0),
        ("5 or 6", "5", 0),
    ],
)
def test_answers_that_need_the_verifier(answer, gold, score):
    assert judged(answer, gold) == (score, "verifier")


def test_threads_may_ask_at_once():
    cases = [(f"x+{i}", f"{i}+x", 1.0) for i in range(4)] + [("x+1", f"x+{i}", 0.0) for i in (2, 3)]
    with ThreadPoolExecutor(3) as pool:
        scores = pool.map(lambda case: judged(case[0], case[1]), cases)
    assert list(scores) == [(score, "verifier") for _, _, score in cases]


# ---- hostile answers


@pytest.fixture
def opened():
    """A function that makes a verifier with other settings."""
    made = []

    def make(**settings):
        made.append(Verifier(**settings))
        return made[-1]

    yield make
    for verifier in made:
        verifier.close()


@pytest.fixture(scope="module")
def short():
    """A verifier with two processes, in which comparisons have a second."""
    verifier = Verifier(limits=LIMITS | {"cpu_seconds": 1}, workers=2)
    yield verifier
    verifier.close()


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^9}}",
        "x^{9^{9^9}}",
        "x+2^{2000000}",
        "10^{-500001}",
        "10^{10^{10}}",
        "2^{2^{2^{2^{2^2}}}}",
        "(9^9)^{9^9}",
        "((10!)!)!",
        "10^{10}!",
        "1000000!",
        "\\dbinom{10^9}{10^8}",
        "\\binom{2000000}{1000000}",
        "(" * 499 + "1" + ")" * 499,
        "\\frac{1}{" * 90 + "2" + "}" * 90,
    ],
)
def test_complex_answer_is_not_compared(opened, answer):
    verifier = opened()
    assert judged(answer, "\\sqrt{2}", by=verifier) == (0, "too_complex")
    assert verifier.idle == [], "no process has started"


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("\\binom{2^{10}}{2}", "523776"),
        ("\\binom{1000000}{2}", "499999500000"),
        ("\\sum_{k=1}^{100000}k", "5000050000"),
        ("1-x^{100000}", "-x^{100000}+1"),
        ("x^{123456}+y", "y+x^{123456}"),
        ("3\\cdot 2^{100000}", "2^{100000}\\cdot 3"),
        ("x+2^{1000000}", "2^{1000000}+x"),
        ("\\frac{100000!}{99999!}", "100000"),
    ],
)
def test_large_numbers_that_the_verifier_decides_at_once(answer, gold):
    assert judged(answer, gold) == (1, "verifier")


@pytest.mark.parametrize(
    "answer",
    [
        *("2^{2^{10}}", "x^{x^{x^x}}", "10^{99999}", "(3!)!", "1000!!", "e^{-10000x}"),
        *("2^{9999999x}", "x_2^{9999999}", "\\int_0^{9999999} x", "(1+x)^{9999999}", "0^{9999999}"),
    ],
)
def test_honest_answer_is_not_too_complex(answer):
    assert not too_complex(answer)


@given(st.text("29!^{}(). _x", max_size=60))
def test_any_text_can_be_checked(text):
    assert too_complex(text) in (True, False)


PIECES = (
    *(
        "\\text{",
        "\\color{",
        "\\underline{",
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        "|",
        "<",
        "\\ne ",
        "x",
        " and ",
    ),
    *(
        ",",
        "12",
        "000",
        " ",
        "_",
        "^",
        "**",
        "`",
        "$",
        "\\setminus",
        "\\{",
        "\\}",
        "三",
        "万",
        "分之",
    ),
    *(
        "twenty",
        "million",
        "third",
        "答案是",
        "π",
        "\u202f",
        "sqrt(",
        "Matrix([[",
        "1j",
        "\\%",
        "°",
        "B.",
        "\n",
    ),
)


@given(st.lists(st.sampled_from(PIECES), max_size=30), st.integers(1, 20))
def test_any_text_can_be_scored(pieces, times):
    text = "".join(pieces) * times
    for answer, gold in ((text, "(1,2)"), ("45^\\circ", text)):
        assert mathematics(answer, [gold], lambda *_: "different")["score"] in (0, 1)


def test_judged_pairs_are_not_too_complex():
    file = ROOT / "tests/data/scorers/maths.jsonl"
    pairs = [json.loads(line) for line in file.read_text().splitlines()]
    assert [pair for pair in pairs if too_complex(pair["answer"])] == []


@pytest.mark.parametrize(
    "answer",
    [
        "\\prod_{n=1}^{99999} (x-n)",
        "\\int \\frac{1}{x^{50}+x^7+3} dx",
        "\\sum_{n=1}^{10^{10}} \\sin(n)",
    ],
)
def test_slow_answer_is_a_timeout(short, answer):
    assert judged(answer, "\\sqrt{2}", by=short) == (0, "timeout")
    short.compare.cache_clear()
    assert judged("\\sqrt{8}", "2\\sqrt{2}", by=short) == (1, "verifier")


def test_comparisons_run_side_by_side(short):
    assert judged("y+1", "1+y", by=short) == (1, "verifier")
    held = short.idle[-1]
    os.kill(held.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(judged, "y+2", "2+y", by=short)
        while held in short.idle:  # until it has the process that stands still
            time.sleep(0.01)
        assert judged("y+3", "3+y", by=short) == (1, "verifier")
        assert not waits.done()
        os.kill(held.pid, signal.SIGCONT)
        assert waits.result() == (1, "verifier")
    assert len(short.idle) == 2


def test_budget_counts_other_answers_that_were_slow():
    """What is known, or needs no verifier, is scored as ever."""
    asked = []

    def compare(answer, gold):
        asked.append((answer, gold))
        return "timeout" if answer.startswith("s") else "equal"

    bounded = budgeted(compare, 2)
    scored = [
        mathematics(answer, ["x+1", "x+2"], bounded)
        for answer in ("s+1", "y+1", "s+2", "y+1", "s+2", "y+2", "x+2")
    ]
    decided = ["timeout", "verifier", "timeout", "verifier", "timeout", "over_budget", "text"]
    assert [set(made) - {"score"} for made in scored] == [{name} for name in decided]
    assert asked == [(s, g) for s, g in (("s+1", "x+1"), ("s+1", "x+2"), ("y+1", "x+1"))] + [
        ("s+2", "x+1"),
        ("s+2", "x+2"),
    ]


def test_memory_has_a_limit(opened):
    """A comparison that does not fit counts as different: here all do."""
    assert judged("\\sqrt{8}", "2\\sqrt{2}") == (1, "verifier")
    small = opened(limits=LIMITS | {"memory_mib": 1})
    assert judged("\\sqrt{8}", "2\\sqrt{2}", by=small) == (0, "verifier")


def test_too_long_is_not_compared():
    for answer in ("9" * 100_000, "{" * 50_000 + "}" * 50_000, "\\sqrt{" * 16_000):
        assert judged(answer, "5") == (0, "too_long")
    assert judged("5", "9" * 100_000) == (0, "too_long")


@pytest.mark.parametrize(
    "answer",
    ["\0", "\ud800", "}", "\\", "%", "\\text{" * 9, "\\boxed{" * 9, "1/0"],
)
def test_nonsense_scores_nothing(answer):
    assert judged(answer, "5") == (0, "verifier")


def test_an_answer_is_not_run_as_code(tmp_path):
    target = tmp_path / "written"
    assert judged(f"__import__('pathlib').Path('{target}').touch()", "5")[0] == 0
    assert not target.exists()


def test_silent_verifier_is_a_wall_timeout(short, monkeypatch):
    assert judged("y+4", "4+y", by=short) == (1, "verifier")
    silent = short.idle[-1]
    os.kill(silent.pid, signal.SIGSTOP)
    monkeypatch.setattr(short, "wall_seconds", 0.05)
    assert judged("y+5", "5+y", by=short) == (0, "wall_timeout")
    assert silent.returncode == -signal.SIGKILL


def test_killed_verifier_is_replaced(short):
    assert judged("y+6", "6+y", by=short) == (1, "verifier")
    dead = short.idle[-1]
    os.kill(dead.pid, signal.SIGSTOP)  # it can be asked, but ends before it answers
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(judged, "y+7", "7+y", by=short)
        while dead in short.idle:
            time.sleep(0.01)
        time.sleep(0.1)  # by then it is asked
        os.kill(dead.pid, signal.SIGKILL)
        assert asked.result() == (0, "killed")
    assert judged("y+7", "7+y", by=short) == (1, "verifier"), "a death is not remembered"


def test_verifier_that_cannot_start_is_an_error(opened, tmp_path):
    broken = tmp_path / "worker.py"
    broken.write_text("raise ImportError('no module named math_verify')")
    with pytest.raises(RuntimeError, match=r"no module named math_verify.*math-verify and antlr4"):
        judged("y+4", "4+y", by=opened(program=broken))


SCORING = """
import sys
from pathlib import Path
from tasks.scorers import maths
maths.VERIFIER.program = Path(sys.argv[1])
print(maths.mathematics("y+1", ["1+y"])["score"], maths.VERIFIER.idle[0].pid, flush=True)
input()
"""
# What takes the verifier's place where the end of its input does not end it.
DEAF = (
    "import time\nprint('ready', flush=True)\ninput()\nprint('equal', flush=True)\ntime.sleep(60)"
)


@pytest.mark.parametrize("how", [signal.SIGKILL, None], ids=["kill", "exit"])
def test_verifier_ends_with_its_trainer(tmp_path, how):
    (deaf := tmp_path / "deaf.py").write_text(DEAF)
    with subprocess.Popen(
        [sys.executable, "-c", SCORING, WORKER if how else deaf],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as scoring:
        score, pid = scoring.stdout.readline().split()
        assert score == b"1.0"
        if how:
            scoring.send_signal(how)
        scoring.stdin.close()
        scoring.wait()
    wait_until(lambda: not _lives(pid.decode()), "the verifier's end")


def _lives(pid):
    try:
        return "\nState:\tZ" not in Path("/proc", pid, "status").read_text()
    except FileNotFoundError:
        return False

"""Compare an answer with the gold answer as mathematics.

In this order: equal text, once both are written in one notation (notation.py); what is no formula
(options, words, numbers of a base, units), compared as what it is; two plain numbers, compared
exactly; math-verify, in processes of its own (maths_worker.py), where an answer that never ends or
fills the memory does no harm. Answers that are too long or too complex (complexity.py) are not
compared at all.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

from tasks.extensions.waiting import is_readable
from tasks.scorers import complexity, maths_worker, notation, ranges
from tasks.scorers.contract import Scorer, ScorerKind
from tasks.scorers.maths_worker import TIMEOUT

LONGEST = 1000  # characters of an answer or a gold answer; longer ones are not compared
# Of one comparison, enforced by the kernel. Honest answers take less than a second; the rest is for
# slower processors.
LIMITS = {"cpu_seconds": 2, "memory_mib": 512}
WORKERS = min(8, len(os.sched_getaffinity(0)))  # comparisons side by side
WALL_SECONDS = 120.0  # only a backstop: on a busy machine a comparison may wait for a processor
OVER_BUDGET = "over_budget"
WORKER = Path(maths_worker.__file__)  # imported, so that the ledger's keys see its edits

_SPACE = re.compile(r"(?<!\d) | (?!\d)")  # no space between digits
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)(?:\\?\$)?\s*(?:(?P<plain>{_DIGITS})(?:[eE](?P<exponent>[+-]?\d{{1,3}}))?|"
    rf"(?:(?P<whole>\d+)\s+)?(?P<above>\d+)\s*/\s*(?P<below>\d+)|"
    rf"(?P<whole_latex>\d+)?\s*"
    rf"\\[dt]?frac\{{(?P<numerator>-?\d+)\}}\{{(?P<denominator>\d+)\}})\s*(?P<percent>\\?%)?\.?"
)


_POINT = re.compile(r"\.\d|\d[eE]")
_REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}")

# ---------------------------------------------------------------- the verifier's processes


class Verifier:
    """math-verify in processes of its own, which start with the comparisons that need them.

    Several threads may compare, up to ``workers`` of them side by side, each in its own process.
    """

    def __init__(
        self,
        limits: Mapping[str, int] = LIMITS,
        wall_seconds: float = WALL_SECONDS,
        program: Path = WORKER,
        workers: int = WORKERS,
    ) -> None:
        self.limits, self.wall_seconds, self.program = limits, wall_seconds, program
        self.idle: list[subprocess.Popen[bytes]] = []  # processes that wait for a comparison
        self.places = threading.BoundedSemaphore(workers)
        # Other policies and later iterations often agree. Errors are not remembered.
        self.compare = functools.lru_cache(maxsize=4096)(self._compare)

    def close(self) -> None:
        """End the idle processes; the next comparison starts another."""
        while self.idle:
            _end(self.idle.pop())

    def _compare(self, answer: str, gold: str) -> str:
        """Return the outcome of one comparison, one of maths_worker.py's.

        Raises TimeoutError or ConnectionError where the process did not answer, and RuntimeError
        where it cannot start.
        """
        with self.places:
            process = self._take()
            try:
                outcome = self._request(process, answer, gold)
            except BaseException:
                _end(process)
                raise
            self.idle.append(process)
            return outcome

    def _take(self) -> subprocess.Popen[bytes]:
        with suppress(IndexError):  # another thread may have taken the last one
            while True:
                process = self.idle.pop()
                if process.poll() is None:
                    return process
                _end(process)
        return self._start()

    def _request(self, process: subprocess.Popen[bytes], answer: str, gold: str) -> str:
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps([answer, gold]).encode() + b"\n")
        process.stdin.flush()
        if not is_readable(process.stdout, self.wall_seconds):
            raise TimeoutError("the mathematics verifier did not answer")
        reply = process.stdout.readline().decode().strip()
        if not reply:
            raise ConnectionError("the mathematics verifier has ended")
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-B", str(self.program), json.dumps(self.limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C at the terminal is for the trainer only
        )
        assert process.stdout
        if process.stdout.readline().decode().strip() != maths_worker.READY:
            process.kill()
            lines = process.communicate()[1].decode(errors="replace").strip().splitlines()
            raise RuntimeError(
                f"the mathematics verifier did not start: {lines[-1] if lines else 'no message'}; "
                "check that math-verify and antlr4-python3-runtime 4.9.3 are installed"
            )
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


# A start takes a second, and scorers are plain functions of texts: this process has one verifier.
VERIFIER = Verifier()
atexit.register(VERIFIER.close)

Compare = Callable[[str, str], str]  # answer and gold answer -> outcome


def budgeted(compare: Compare, most_timeouts: int) -> Compare:
    """Return a comparison that is "over_budget" after timeouts of ``most_timeouts`` other answers.

    Each pair is compared once. What is known already stays known when the budget is used up.
    """
    known: dict[tuple[str, str], str] = {}

    def bounded(answer: str, gold: str) -> str:
        if (answer, gold) not in known:
            slow = {
                known_answer for (known_answer, _), outcome in known.items() if outcome == TIMEOUT
            }
            if len(slow - {answer}) >= most_timeouts:
                return OVER_BUDGET
            known[answer, gold] = compare(answer, gold)
        return known[answer, gold]

    return bounded


# ---------------------------------------------------------------- the score


def mathematics(
    answer: str, accepted: Sequence[str], compare: Compare = VERIFIER.compare
) -> dict[str, float]:
    """Score 1 if the answer equals an accepted form, else 0; the other entry names what decided.

    That is "text", "number" or "verifier"; or, with score 0, "too_long" (more than ``LONGEST``
    characters), "too_complex" (complexity.py), the end of math-verify by "timeout" (CPU time),
    "wall_timeout" or "killed", or "over_budget" (``budgeted``). A comparison that needs more memory
    than ``LIMITS`` allow counts as different.

    Raises RuntimeError where the verifier does not start.
    """
    score, by = 0.0, "text"
    for form in accepted:
        score, by = _judge(answer.strip(), form.strip(), compare)
        if score:
            break
    return {"score": score, by: 1.0}


def _judge(answer: str, gold: str, compare: Compare) -> tuple[float, str]:
    """Return the score against one accepted form, and what decided it."""
    if _unspaced(answer) == _unspaced(gold):
        return float(bool(gold)), "text"
    if max(len(answer), len(gold)) > LONGEST:
        return 0.0, "too_long"
    ours, theirs = number(answer), number(gold)
    if ours and theirs and not (judged := _judge_numbers(ours, theirs, answer, gold))[0]:
        return judged  # most wrong answers, which need no other notation
    plain = notation.latex(answer, natural=not notation.has_log(gold))
    return _judge_formulas(
        plain, notation.latex(gold, natural=not notation.has_log(answer)), compare
    )


def _judge_formulas(answer: str, gold: str, compare: Compare) -> tuple[float, str]:
    """Return the score of an answer in one notation with the gold answer, and what decided it."""
    if _unspaced(answer) == _unspaced(gold):
        return float(bool(gold)), "text"
    if not answer:
        return 0.0, "text"
    if (items := notation.printed_list(answer, gold)) is not None:
        return _judge_formulas(items, gold, compare)
    options = notation.option_with_text(answer), notation.option_with_text(gold)
    if options[0] and options[1]:
        if options[0][0] != options[1][0]:
            return 0.0, "text"
        return _judge_formulas(options[0][1], options[1][1], compare)
    same = _same_kind(answer, gold)
    if same is not None:
        return float(same), "text"
    answer, gold = _in_one_unit(answer, gold)
    measures = notation.with_unit(answer), notation.with_unit(gold)
    if any(measures):
        units = {measure[1] for measure in measures if measure}
        if len(units) > 1 or ("deg" in units and ("%" in answer or "%" in gold)):
            return 0.0, "unit"
        values = [m[0] if m else whole for m, whole in zip(measures, (answer, gold), strict=True)]
        return _judge_formulas(values[0], values[1], compare)
    ours, theirs = number(answer), number(gold)
    if ours and theirs:
        return _judge_numbers(ours, theirs, answer, gold)
    return _judge_sets(answer, gold, compare)


def _judge_numbers(
    ours: tuple[Fraction, bool], theirs: tuple[Fraction, bool], answer: str, gold: str
) -> tuple[float, str]:
    """Return the score of two plain numbers, of which the texts tell whether they are decimals."""
    return float(_same_number(*ours, *theirs, _is_decimal(answer), _is_decimal(gold))), "number"


def _judge_sets(answer: str, gold: str, compare: Compare) -> tuple[float, str]:
    """Return the score of two formulas; sets of reals are compared as intervals."""
    ours, theirs = ranges.real_set(answer), ranges.real_set(gold)
    if ours and theirs:
        if ours[0] and theirs[0] and ours[0] != theirs[0]:  # of other variables
            return 0.0, "text"
        answer, gold = ours[1], theirs[1]
        if _unspaced(answer) == _unspaced(gold):
            return 1.0, "text"
    texts = [notation.powers_of_ten(notation.angles_in_radians(text)) for text in (answer, gold)]
    return _verified(texts[0], texts[1], compare)


def _in_one_unit(answer: str, gold: str) -> tuple[str, str]:
    """Write degrees as radians, where the other side has radians, and drop the names of radians.

    A bare number beside degrees is degrees, so a multiple of pi beside them is radians.
    """
    texts = [answer, gold]
    for ours, theirs in ((0, 1), (1, 0)):
        measure = notation.with_unit(texts[theirs])
        radians = bool(measure and measure[1] == "rad")
        if notation.has_degrees(texts[ours]) and (radians or r"\pi" in texts[theirs]):
            texts[ours] = notation.angles_in_radians(texts[ours])
            texts[theirs] = measure[0] if measure and radians else texts[theirs]
    return texts[0], texts[1]


def _same_kind(answer: str, gold: str) -> bool | None:
    """Compare answers that are no formulas, such as options and words; None for formulas."""
    if (same := _same_option(answer, gold)) is not None:
        return same
    bases = notation.in_base(answer), notation.in_base(gold)
    if all(bases):
        return bases[0] == bases[1]
    ours, theirs = notation.words(answer), notation.words(gold)
    if ours or theirs:
        return ours == theirs
    ours, theirs = notation.clock(answer), notation.clock(gold)
    if ours and theirs:
        return ours == theirs
    if notation.repeats(answer) and not notation.repeats(gold):
        return False
    ours, theirs = notation.brackets(answer), notation.brackets(gold)
    several = [
        (notation.is_list(text) or notation.is_set(text)) and not ranges.real_set(text)
        for text in (answer, gold)
    ]
    lists = (theirs and several[0]) or (ours and several[1])
    return False if lists or (ours and theirs and ours != theirs) else None


def _same_option(answer: str, gold: str) -> bool | None:
    """Compare options of a multiple choice, where one of them has no text; None for others."""
    ours, theirs = notation.option(answer), notation.option(gold)
    if ours and theirs:
        return ours == theirs
    if ours and (with_text := notation.option_with_text(gold)):
        return ours == with_text[0]
    if theirs and (with_text := notation.option_with_text(answer)):
        return theirs == with_text[0]
    return None


def _verified(answer: str, gold: str, compare: Compare) -> tuple[float, str]:
    """Return math-verify's score, or how it ended, or why it is not asked."""
    if complexity.too_complex(answer):
        return 0.0, "too_complex"
    try:
        outcome = compare(answer, gold)
    except TimeoutError:
        return 0.0, "wall_timeout"
    except ConnectionError:
        return 0.0, maths_worker.KILLED
    if outcome in (maths_worker.EQUAL, maths_worker.DIFFERENT):
        return float(outcome == maths_worker.EQUAL), "verifier"
    return 0.0, outcome


def _unspaced(text: str) -> str:
    """Drop white space, which has no meaning in LaTeX, except between digits ("1 1/2")."""
    return _SPACE.sub("", " ".join(text.split()))


def number(text: str) -> tuple[Fraction, bool] | None:
    """Return the value of a plain number and whether it has a percent sign, or None.

    Plain numbers are integers, decimals and fractions, with or without thousands separators, a
    dollar sign and a final full stop, and mixed numbers: "18", "-1,234.50", "$5", "1.5e3", "3/4",
    "1 3/4", "\\frac{3}{4}", "12\\%".
    """
    if repeating := _REPEATING.fullmatch(text):
        return _repeating(*repeating.groups()), False
    matched = _NUMBER.fullmatch(text)
    if not matched:
        return None
    above = matched["plain"] or matched["above"] or matched["numerator"]
    below = int(matched["below"] or matched["denominator"] or 1)
    if not below:
        return None
    value = Fraction(above.replace(",", "").rstrip(".")) / below
    value = value * Fraction(10) ** int(matched["exponent"] or 0)
    value += int(matched["whole"] or matched["whole_latex"] or 0)
    return (-value if matched["sign"] == "-" else value), bool(matched["percent"])


def _repeating(sign: str, whole: str, decimals: str, period: str) -> Fraction:
    """Return the value of a repeating decimal: 0.1\\overline{6} is 1/6."""
    nines = 10 ** len(period) - 1
    fraction = Fraction(int(whole + decimals or "0")) + Fraction(int(period), nines)
    return (-1 if sign == "-" else 1) * fraction / 10 ** len(decimals)


def _is_decimal(text: str) -> bool:
    """Return whether a plain number is written with a point or an exponent, as floats are."""
    return bool(_POINT.search(text)) and "\\" not in text.replace("\\%", "").replace("\\$", "")


def _same_number(
    a: Fraction, a_percent: bool, b: Fraction, b_percent: bool, a_decimal: bool, b_decimal: bool
) -> bool:
    """Compare; 25% equals both 25 and 0.25, as answers write a percentage in either way."""
    same = maths_worker.same_number
    if a_percent == b_percent:
        return same(a, b, a_decimal, b_decimal)
    percent, plain, decimals = (
        (a, b, (a_decimal, b_decimal)) if a_percent else (b, a, (b_decimal, a_decimal))
    )
    return any(same(each, plain, *decimals) for each in (percent, percent / 100))


def _of_a_question(most_timeouts: int) -> Scorer:
    """Return the scorer for all answers of one question, which share a budget of slow ones."""
    return functools.partial(mathematics, compare=budgeted(VERIFIER.compare, most_timeouts))


SCORER = ScorerKind(mathematics, lenient=True, of_a_question=_of_a_question)

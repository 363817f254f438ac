"""The process of the mathematics verifier, which forks a confined process for each comparison.

Started by maths.py as ``python <this file> <limits>``. An answer is hostile: ``9^{9^{9^9}}`` would
compute for ever and fill the memory. The libraries limit themselves by an alarm signal, which needs
the main thread and depends on the load of the machine; here the kernel limits the CPU time and the
memory of each comparison. Every fork starts from the same memory, so no answer is judged with what
was cached for another.

A request is a line of JSON, [answer, gold]; the reply is a line with the outcome, which the exit
status of the forked process decides. The end of standard input ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import resource
import signal
import sys
from fractions import Fraction
from typing import Any

EQUAL, DIFFERENT = "equal", "different"
TIMEOUT, KILLED = "timeout", "killed"
READY = "ready"
STATUS = {EQUAL: 201, DIFFERENT: 202}  # unusual numbers, which no crash ends with
PR_SET_PDEATHSIG = 1

# Compared once before the first fork, to fill the caches of parsers and patterns.
SAMPLES = (
    (r"\frac{1}{2}", "0.5"),
    (r"\sqrt{12}", r"2\sqrt{3}"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\left(3, \frac{\pi}{2}\right)", r"(3,\pi/2)"),
    (r"[0, \infty)", r"x \ge 0"),
    ("1, 2", r"\{1,2\}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}"),
    ("y=2x", "2x-y=0"),
    (r"5\text{ cm}", "five"),
    (r"3+2i", r"90^\circ"),
)


# ---------------------------------------------------------------- equal numbers

# A decimal equals a number that has other digits, too, if it is that number rounded or cut off,
# with at least this many digits, zeros at the end not counted.
FEWEST_DIGITS = 7
FLOAT_DIGITS = range(15, 18)  # of a float, which has a rounding error
FLOAT_ERROR = Fraction(1, 10**14)  # of a float's value; beside 0, of 1
LEAST_NOISE = 3  # digits of a rounding error beside 0: 1.22e-16 is one, 1e-16 is a number
EVALUATED = 40  # digits to which an irrational number is compared with a decimal
CANCELLED = 400  # digits that two exact numbers share before they count as equal


def same_number(ours: Fraction, theirs: Fraction, decimal: bool, gold_decimal: bool) -> bool:
    """Return whether two numbers are equal; ``decimal``: a number is written with a point.

    Others, such as integers and fractions, are exact: they are equal to nothing but themselves.
    """
    if ours == theirs:
        return True
    return (decimal and _stands_for(ours, theirs)) or (gold_decimal and _stands_for(theirs, ours))


def _stands_for(decimal: Fraction, number: Fraction) -> bool:
    """Return whether a decimal is a number rounded, cut off, or with a float's rounding error."""
    if not number:
        return abs(decimal) < FLOAT_ERROR and _digits(decimal)[0] >= LEAST_NOISE
    if decimal.denominator == 1:  # an integer, in whatever notation
        return False
    digits, unit = _digits(decimal)
    missing = (number - decimal) * (1 if number > 0 else -1)
    if digits in FLOAT_DIGITS and abs(missing) <= FLOAT_ERROR * abs(number):
        return True
    return digits >= FEWEST_DIGITS and -unit / 2 <= missing < unit


def _digits(decimal: Fraction) -> tuple[int, Fraction]:
    """Return how many digits a decimal has, without zeros around them, and the last one's unit."""
    places, below = 0, decimal.denominator
    while below % 10 == 0:
        places, below = places + 1, below // 10
    while below % 2 == 0 or below % 5 == 0:  # what is left divides a power of ten
        places, below = places + 1, below // (2 if below % 2 == 0 else 5)
    digits = str(abs(decimal.numerator) * 10**places // decimal.denominator).strip("0")
    return len(digits), Fraction(1, 10**places)


# ---------------------------------------------------------------- math-verify


def same(answer: str, gold: str) -> bool:
    """Return whether math-verify takes two LaTeX expressions for equal.

    Only its LaTeX parser is used; the other one passes text to Python's ``eval``. Numbers are
    compared by ``same_number``, where math-verify rounds both to six decimals.
    """
    from math_verify import LatexExtractionConfig, grader, parse, verify

    grader.sympy_numeric_eq = _same_value
    grader.sympy_symbolic_eq = _same_formula
    reader = [LatexExtractionConfig()]
    read = [parse(f"$${text}$$", reader, parsing_timeout=None) for text in (gold, answer)]
    gold_read, answer_read = ([_with_constants(each) for each in found] for found in read)
    return bool(verify(gold_read, answer_read, timeout_seconds=None))


def _with_constants(read: Any) -> Any:
    """Return a parsed expression in which the letters i and e are numbers, if it is one.

    The left side of ``E = 5`` stays a name.
    """
    import sympy
    from latex2sympy2_extended.logic import And

    if isinstance(read, And):
        return And(*map(_with_constants, read._unsorted_args))
    if isinstance(read, sympy.core.relational.Relational):
        left = read.lhs if read.lhs.is_Symbol else _with_constants(read.lhs)
        return read.func(left, _with_constants(read.rhs), evaluate=False)
    if not isinstance(read, sympy.Basic | sympy.MatrixBase):
        return read
    numbers = {"i": sympy.I, "e": sympy.E}
    letters = [each for each in read.free_symbols if getattr(each, "name", "") in numbers]
    return read.xreplace({each: numbers[each.name] for each in letters}) if letters else read


def _same_value(gold: Any, answer: Any, *_: object) -> bool:
    """Compare two expressions without variables, or matrices of them, as numbers."""
    import sympy

    if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        cells = zip(gold.flat(), answer.flat(), strict=False)
        return gold.shape == answer.shape and all(_same_cell(*pair) for pair in cells)
    if not (_is_number(gold) and _is_number(answer)):
        return False
    return _same_exact(_exact(gold), _exact(answer), _has_decimals(gold), _has_decimals(answer))


def _same_cell(gold: Any, answer: Any) -> bool:
    return bool(gold == answer or _same_value(gold, answer) or _same_formula(gold, answer))


def _same_exact(gold: Any, answer: Any, gold_decimal: bool, decimal: bool) -> bool:
    """Compare two numbers whose decimals are fractions; the flags tell which had decimals."""
    if gold == answer or _vanishes(gold - answer):
        return True
    if not (gold_decimal or decimal):
        return False
    pairs = zip(_parts(answer, decimal), _parts(gold, gold_decimal), strict=True)
    return all(same_number(ours, theirs, decimal, gold_decimal) for ours, theirs in pairs)


def _is_number(value: Any) -> bool:
    import sympy

    return isinstance(value, sympy.Expr) and not value.free_symbols and value.is_finite is not False


def _exact(value: Any) -> Any:
    """Return an expression whose decimals are exact: 0.1 is a tenth."""
    import sympy

    floats = value.atoms(sympy.Float)
    return value.xreplace({each: sympy.Rational(str(each)) for each in floats}).doit()


def _has_decimals(value: Any) -> bool:
    import sympy

    return bool(value.has(sympy.Float))


def _vanishes(difference: Any) -> bool:
    """Return whether the difference of two exact numbers is 0, however small they are."""
    import sympy
    from sympy.core.evalf import PrecisionExhausted

    unevaluated = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit)
    if difference.has(*unevaluated):  # known to few digits
        return bool(sympy.simplify(difference).is_zero)
    parts = difference.as_real_imag() if difference.has(sympy.I) else (difference,)
    for part in parts:
        try:
            if part.evalf(2, maxn=CANCELLED, strict=True) != 0:
                return False
        except PrecisionExhausted:  # all digits cancel
            continue
    return True


def _parts(value: Any, decimal: bool) -> list[Fraction]:
    """Return the real and the imaginary part."""
    return [_fraction(part, decimal) for part in value.as_real_imag()]


def _fraction(part: Any, decimal: bool) -> Fraction:
    """Return a number's value; what was computed with decimals has a float's digits."""
    if part.is_Rational:
        return Fraction(int(part.p), int(part.q))
    return Fraction(str(part.evalf(FLOAT_DIGITS[-1] if decimal else EVALUATED)))


def _same_formula(gold: Any, answer: Any) -> bool:
    """Compare two expressions with variables: their difference, else their coefficients."""
    import sympy

    if not all(isinstance(each, sympy.Expr) for each in (gold, answer)):
        difference = sympy.simplify(gold - answer)
        return isinstance(difference, sympy.MatrixBase) and bool(difference.is_zero_matrix)
    if not (gold.free_symbols or answer.free_symbols):
        return False
    theirs, ours = _exact(gold), _exact(answer)
    if sympy.expand(theirs - ours) == 0 or sympy.simplify(theirs - ours).is_zero:
        return True
    return _same_coefficients(theirs, ours, _has_decimals(gold), _has_decimals(answer))


def _same_coefficients(gold: Any, answer: Any, gold_decimal: bool, decimal: bool) -> bool:
    """Compare two polynomials, of whatever they have in common, term by term."""
    import sympy

    try:
        polynomials, _ = sympy.parallel_poly_from_expr((gold, answer))
    except sympy.PolynomialError:
        return False
    theirs, ours = (dict(each.terms()) for each in polynomials)
    return theirs.keys() == ours.keys() and all(
        _same_exact(theirs[term], ours[term], gold_decimal, decimal) for term in theirs
    )


def main() -> None:
    """Answer requests until standard input ends."""
    limits = json.loads(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # output of a library is no reply
    logging.disable()
    for answer, gold in SAMPLES:
        same(answer, gold)
    gc.collect()
    gc.freeze()  # so that no collection writes to memory shared with the forks
    print(READY, file=replies)
    for line in sys.stdin.buffer:
        answer, gold = json.loads(line)
        print(call(answer, gold, limits), file=replies)


def call(answer: str, gold: str, limits: dict[str, int]) -> str:
    """Compare in a forked process; return the outcome."""
    warm = os.getpid()
    child = os.fork()
    if child == 0:
        live(answer, gold, limits, warm)
    _, status, usage = os.wait4(child, 0)
    ended = os.waitstatus_to_exitcode(status)
    used = usage.ru_utime + usage.ru_stime
    if ended == -signal.SIGXCPU or (ended == -signal.SIGKILL and used >= limits["cpu_seconds"]):
        return TIMEOUT
    return next((name for name, status in STATUS.items() if status == ended), KILLED)


def live(answer: str, gold: str, limits: dict[str, int], warm: int) -> None:
    """Compare and exit; the forked process always ends here.

    math-verify turns its own errors into "different", also a lack of memory and deep nesting.
    """
    status = 1
    try:
        confine(limits, warm)
        status = STATUS[EQUAL if same(answer, gold) else DIFFERENT]
    finally:
        os._exit(status)


def confine(limits: dict[str, int], warm: int) -> None:
    """Set the limits of this process, and end it when the warm process ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != warm:
        raise RuntimeError("the warm process ended before its death could be noticed")
    for descriptor in (0, 2):
        os.dup2(1, descriptor)
    memory, seconds = limits["memory_mib"] * 2**20, limits["cpu_seconds"]
    for kind, soft, hard in (
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_CPU, seconds, seconds + 1),  # SIGXCPU, then SIGKILL
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        with contextlib.suppress(ValueError):  # the limit is lower already
            resource.setrlimit(kind, (soft, hard))


if __name__ == "__main__":
    main()

"""Whether an answer is mathematically the gold answer (algorithms section 6).

What decides, in this order: equal text; two plain numbers, compared exactly; math-verify, in a
process of its own (maths_worker.py), which any answer may hang or fill without harm. That process
starts with the first answer that needs it and ends with this one.
"""

from __future__ import annotations

import atexit
import functools
import json
import re
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from tasks.scorers import maths_worker

LONGEST = 1000  # characters of an answer or a gold answer that are looked at
LIMITS = {"cpu_seconds": 2, "memory_mib": 512}  # of one comparison; both are the kernel's
WALL_SECONDS = 120.0  # a backstop only: outcomes must not depend on the machine's load
WORKER = Path(maths_worker.__file__)  # imported so that its edits count as this scorer's

_SPACE = re.compile(r"(?<!\d) | (?!\d)")  # not one between digits
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)(?:\\?\$)?\s*(?:(?P<plain>{_DIGITS})|"
    rf"(?P<above>\d+)\s*/\s*(?P<below>\d+)|"
    rf"\\[dt]?frac\{{(?P<numerator>-?\d+)\}}\{{(?P<denominator>\d+)\}})\s*(?P<percent>\\?%)?\.?"
)


def mathematics(answer: str, accepted: Sequence[str]) -> dict[str, float]:
    """Score 1 if the answer equals an accepted form, else 0; the other entry names what decided.

    "text", "number" or "verifier" decided; or nothing could: "too_long" (more than ``LONGEST``
    characters), or math-verify ended by "timeout" (processor time), "wall_timeout" or "killed", all
    of which score 0. What needs more memory than ``LIMITS`` allow, math-verify takes for different.
    Raises RuntimeError where the verifier does not start.
    """
    judged = [_judge(answer.strip(), form.strip()) for form in accepted]
    score, by = max(judged, key=lambda made: made[0], default=(0.0, "text"))
    return {"score": score, by: 1.0}


def _judge(answer: str, gold: str) -> tuple[float, str]:
    """The score against one accepted form, and what decided it."""
    if _unspaced(answer) == _unspaced(gold):
        return 1.0, "text"
    if max(len(answer), len(gold)) > LONGEST:
        return 0.0, "too_long"
    ours, theirs = number(answer), number(gold)
    if ours and theirs:
        return float(_same_number(*ours, *theirs)), "number"
    try:
        outcome = _verify(answer, gold)
    except TimeoutError:
        return 0.0, "wall_timeout"
    except ConnectionError:
        return 0.0, maths_worker.KILLED
    if outcome in (maths_worker.EQUAL, maths_worker.DIFFERENT):
        return float(outcome == maths_worker.EQUAL), "verifier"
    return 0.0, outcome


def _unspaced(text: str) -> str:
    """White space says nothing in LaTeX, but that "1 1/2" is not "11/2"."""
    return _SPACE.sub("", " ".join(text.split()))


def number(text: str) -> tuple[Fraction, bool] | None:
    """The value of a plain number and whether a percent sign follows; None for anything else.

    Plain are integers, decimals and fractions, with or without thousands separators, a dollar sign
    and a final full stop: "18", "-1,234.50", "$5", "3/4", "\\frac{3}{4}", "12\\%".
    """
    found = _NUMBER.fullmatch(text)
    if not found:
        return None
    above = found["plain"] or found["above"] or found["numerator"]
    below = int(found["below"] or found["denominator"] or 1)
    if not below:
        return None
    value = Fraction(above.replace(",", "").rstrip(".")) / below
    return (-value if found["sign"] == "-" else value), bool(found["percent"])


def _same_number(a: Fraction, a_percent: bool, b: Fraction, b_percent: bool) -> bool:
    """Where one of two has a percent sign, it may be a unit (25 %, "25") or a hundredth (0.25)."""
    if a_percent == b_percent:
        return a == b
    percent, plain = (a, b) if a_percent else (b, a)
    return plain in (percent, percent / 100)


# ---- the verifier's process

_process: subprocess.Popen[bytes] | None = None
_turn = threading.Lock()  # callers may be threads; the process answers one at a time


@functools.lru_cache(maxsize=4096)  # the rollouts of a question often agree
def _verify(answer: str, gold: str) -> str:
    """What became of one comparison: an outcome of maths_worker.py.

    Raises TimeoutError or ConnectionError (not remembered) where the process did not answer; the
    next call starts another.
    """
    global _process
    with _turn:
        if _process is None or _process.poll() is not None:
            _process = _start()
        try:
            return _ask(_process, answer, gold)
        except OSError:
            _stop()
            raise


def _ask(process: subprocess.Popen[bytes], answer: str, gold: str) -> str:
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps([answer, gold]).encode() + b"\n")
    process.stdin.flush()
    if not select.select([process.stdout], [], [], WALL_SECONDS)[0]:
        raise TimeoutError("the mathematics verifier did not answer")
    reply = process.stdout.readline().decode().strip()
    if not reply:
        raise ConnectionError("the mathematics verifier has ended")
    return reply


def _start() -> subprocess.Popen[bytes]:
    """Start the process; raises RuntimeError with what it said where it does not get ready."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-B", str(WORKER), json.dumps(LIMITS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # an interrupt at the terminal is for the trainer, not for it
    )
    assert process.stdout
    if process.stdout.readline().decode().strip() != maths_worker.READY:
        process.kill()
        said = process.communicate()[1].decode(errors="replace").strip().splitlines()
        raise RuntimeError(
            f"the mathematics verifier did not start: {said[-1] if said else 'it said nothing'}; "
            "check that math-verify and antlr4-python3-runtime 4.9.3 are installed"
        )
    return process


@atexit.register
def _stop() -> None:
    """End the process, if it runs; the next answer that needs it starts another."""
    global _process
    if _process is not None:
        _process.kill()
        _process.communicate()
        _process = None

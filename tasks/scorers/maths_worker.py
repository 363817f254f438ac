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


def same(answer: str, gold: str) -> bool:
    """Return whether math-verify takes two LaTeX expressions for equal.

    Only its LaTeX parser is used; the other one passes text to Python's ``eval``.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    reader = [LatexExtractionConfig()]
    read = [parse(f"$${text}$$", reader, parsing_timeout=None) for text in (gold, answer)]
    return verify(*read, timeout_seconds=None)


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

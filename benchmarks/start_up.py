"""Measure what the stages of a finished run need to start, and to find that all is known.

``python -m benchmarks.start_up [RECIPE]``, after ``make run RECIPE=smoke``. Each stage runs as in a
run: forked from a process with the libraries (flows/host/warm.py). Seconds are processor seconds of
the stage's own process; the first column is from its start to its first sub-step. Beside them
stands ``import torch`` in a fresh interpreter.
"""

from __future__ import annotations

import argparse
import atexit
import os
import resource
import runpy
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

STAGES = ("prepare", "cold_start", "reward_model", "champion", "reinforce", "evaluate", "verdict")
TOLD = "of the stage:"  # begins the line that a stage ends with


def main(recipe: str, repeats: int) -> None:
    """Print a table: a row for each stage, medians of ``repeats`` runs."""
    from flows.host import warm
    from flows.workers.connection import prefect_server

    torch = [_seconds([sys.executable, "-c", "import torch"]) for _ in range(repeats)]
    print(f"import torch: {_shown(torch)}")
    with warm.parent(), prefect_server():
        for stage in STAGES:
            told = [_ask(stage, recipe) for _ in range(repeats)]
            first, whole = zip(*told, strict=True)
            print(f"{stage:<14} first sub-step {_shown(first)}   whole {_shown(whole)}", flush=True)


def _seconds(command: Sequence[str]) -> float:
    """Run a command; return its processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _ask(stage: str, recipe: str) -> tuple[float, float]:
    """Run a stage; return its processor seconds until its first sub-step, and all."""
    command = [sys.executable, "-m", "benchmarks.start_up", recipe, "--stage", stage]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    line = next(line for line in ended.stderr.splitlines() if line.startswith(TOLD))
    first, whole = map(float, line.removeprefix(TOLD).split())
    return first, whole


def _shown(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({', '.join(f'{one:.2f}' for one in seconds)})"


def run(stage: str, recipe: str) -> None:
    """Be a stage that says at its end what it took; it has been forked by now."""
    from tasks.ledger import substeps

    firsts: list[float] = []
    find = substeps.Ledger.find

    def noted(*arguments: Any, **others: Any) -> Any:
        firsts.append(_own())
        return find(*arguments, **others)

    def tell() -> None:
        whole = _own()
        print(TOLD, firsts[0] if firsts else whole, whole, file=sys.stderr)

    substeps.Ledger.find = noted  # type: ignore[method-assign]
    sys.argv[:] = [stage, recipe]
    atexit.register(tell)  # a stage does not return (flows/__init__.py, exit_fast)
    runpy.run_module(f"flows.{stage}", run_name="__main__")


def _own() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", default="smoke")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stage", choices=STAGES)
    chosen = parser.parse_args()
    if chosen.stage:
        sys.argv[0] = "-m"  # as it is while Python looks for a stage's module
        import flows  # noqa: F401  hands the work over

        run(chosen.stage, chosen.recipe)
    else:
        os.environ.pop("BEAMLINE_WARM", None)
        main(chosen.recipe, chosen.repeats)

"""Measure what a call of the Python tool costs: processor time of its processes, and wall time.

    python -m benchmarks.tool_call

One worker in each sandbox runs the same small code again and again. Processor time is that of all
processes below this one, those that have ended included; the caller's own is not in it. To compare
two versions of the code, call this in a checkout of each, in turns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tasks.tools.python import PythonTool, Run, python_tool
from tasks.tools.sandbox import PROGRAMS

CODE, RESULT = "print(sum(range(100)))", "4950"
CALLS, REPETITIONS = 200, 5
TICKS = os.sysconf("SC_CLK_TCK")  # per second
SETTINGS = {
    "cpu_seconds": 5,
    "wall_seconds": 20.0,
    "memory_mib": 256,
    "processes": 8,
    "file_mib": 8,
    "output_characters": 4000,
}


def descendants(process: int) -> list[int]:
    """Return the processes below a process."""
    processes: list[int] = []
    waiting = [process]
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").iterdir():
            children = [int(child) for child in (task / "children").read_text().split()]
            processes += children
            waiting += children
    return processes


def processor_seconds(processes: Sequence[int]) -> float:
    """Return the processor time of processes and of those that they have waited for."""
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(int(field) for field in fields[11:15])
    return ticks / TICKS


def measured(run: Run, calls: int) -> tuple[float, float]:
    """Return the processor time and the median wall time of a call, in milliseconds."""
    time.sleep(0.1)  # until the next call's processes wait for it
    before = processor_seconds(descendants(os.getpid()))
    walls = []
    for _ in range(calls):
        began = time.perf_counter()
        (observation,) = run([CODE])
        walls.append(time.perf_counter() - began)
        assert observation.text == RESULT
    time.sleep(0.1)
    used = processor_seconds(descendants(os.getpid())) - before
    return 1000 * used / calls, 1000 * median(walls)


def main(calls: int = CALLS, repetitions: int = REPETITIONS) -> None:
    """Measure and print each sandbox."""
    for sandbox in PROGRAMS:
        with python_tool(PythonTool.model_validate({"sandbox": sandbox, **SETTINGS}), 1) as run:
            measured(run, calls)
            measurements = [measured(run, calls) for _ in range(repetitions)]
        processor, wall = (median(each) for each in zip(*measurements, strict=True))
        print(f"{sandbox}: {processor:.2f} ms of processor time, {wall:.2f} ms of wall time")


if __name__ == "__main__":
    main()

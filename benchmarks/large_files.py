"""Measure ``prepare`` on large files of questions: processor time and memory, by their number.

    python -m benchmarks.large_files

A recipe's training questions are one Parquet file of chats (a system message and a question of some
300 characters; half are scored by ``maths``, half by ``f1``), with 1,000 test questions, a tiny
policy and no traces. Each size is a process of its own with one thread. Seconds are processor time
of the process and its children, after the imports; memory is the highest resident memory less that
after the imports. Writes benchmarks/large_files.json. ``--profile`` shows where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from params.schema.agent import Dialogue
from params.schema.base import Machine
from params.schema.benchmarks import Benchmark
from params.schema.prepare import BenchmarkQuestions, Prepare, TinyPolicy
from tasks.dialects.tags import Tags
from tasks.environments.contract import OpenEnvironment
from tasks.environments.question import Questions
from tasks.ledger.substeps import SubStep
from tasks.prepare import PrepareInputs, prepare

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("large_files.json")
SIZES = (20_000, 100_000, 1_000_000)
TESTS = 1000
CHARACTERS = 300  # of a question
WORDS = 20_000  # of the vocabulary that questions are drawn from
PORTION = 10_000  # questions that are written at a time
MIB = 2**20

CHAT = pa.schema(
    {
        "chat": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "answer": pa.string(),
        "ability": pa.string(),
    }
)
SET = Benchmark(
    hub=None,
    question="chat",
    answer="answer",
    answer_after=None,
    solution=None,
    records=None,
    scorer={"field": "ability", "math": "maths", "qa": "f1"},
)
SETTINGS = Prepare(
    policy=TinyPolicy(
        kind="tiny",
        vocabulary=2048,
        hidden=64,
        layers=2,
        heads=2,
        key_value_heads=1,
        feed_forward=128,
        context=1024,
    ),
    questions=BenchmarkQuestions(
        source="benchmarks", train=("large/train",), validation=200, test=("large/test",)
    ),
    intake=None,
    expert=None,
    faulty="stop",
    overlap_words=13,
)
DIALOGUE = Dialogue(system="", turn_tokens=96, result_tokens=32, response_tokens=256, tool_calls=3)


# ---------------------------------------------------------------- a file of questions


def write_questions(file: Path, count: int, seed: str) -> None:
    """Write ``count`` chats with their answers, a portion at a time."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 10))) for _ in range(WORDS)]
    file.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(file, CHAT, compression="zstd") as writer:
        for start in range(0, count, PORTION):
            size = min(PORTION, count - start)
            rows = [_row(draw, words, start + number) for number in range(size)]
            writer.write_table(pa.Table.from_pylist(rows, schema=CHAT))


def _row(draw: random.Random, words: Sequence[str], number: int) -> dict[str, Any]:
    question_words = draw.choices(words, k=CHARACTERS // 7)
    question = (
        f"{' '.join(question_words).capitalize()}: what is {draw.randint(0, 999)} plus {number}?"
    )
    maths = number % 2 == 0
    return {
        "chat": [
            {"role": "system", "content": "Answer the question."},
            {"role": "user", "content": question},
        ],
        "answer": str(draw.randint(0, 10**6)) if maths else " ".join(question_words[:2]),
        "ability": "math" if maths else "qa",
    }


# ---------------------------------------------------------------- one measurement


def measure(count: int, profile: bool = False) -> dict[str, Any]:
    """Prepare ``count`` questions in a new folder; return seconds and memory."""
    with _new_folder():
        write_questions(Path("data/sources/large/train.parquet"), count, "train")
        write_questions(Path("data/sources/large/test.parquet"), TESTS, "test")
        inputs = PrepareInputs(
            settings=SETTINGS,
            sets={"large": SET},
            sources=[],
            dialogue=DIALOGUE,
            tools={},
            machine=Machine(threads=1, device="cpu", precision="float32"),
            dialect={"tags": Tags()},
        )
        gc.collect()
        gc.freeze()  # what imports have made, as flows do
        Path("/proc/self/clear_refs").write_text("5")  # the peak is of what follows
        before, started = _status("VmRSS"), _processor_seconds()
        profiler = cProfile.Profile()
        if profile:
            profiler.enable()
        record = prepare(SubStep("large", "prepare", 0, 0), inputs, open_environment=_no_tools)
        profiler.disable()
        seconds = _processor_seconds() - started
        if profile:
            pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(45)
    return {
        "questions": count,
        "seconds": round(seconds, 1),
        "peak_mib": round((_status("VmHWM") - before) / MIB, 1),
        "kept": record["metrics"]["train_questions"],
    }


@contextmanager
def _new_folder() -> Iterator[None]:
    home = Path.cwd()
    with tempfile.TemporaryDirectory(dir=home) as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(home)


@contextmanager
def _no_tools(corpus: Path) -> Iterator[OpenEnvironment]:
    yield OpenEnvironment([], lambda: nullcontext(Questions(lambda calls: [])))


def _processor_seconds() -> float:
    """Return the processor time of this process and of the children that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _status(name: str) -> int:
    """Return a number of bytes from this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


# ---------------------------------------------------------------- all of them


def measure_apart(count: int, folder: Path) -> dict[str, Any]:
    """Call ``measure`` in a new process with one thread, in ``folder``."""
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.large_files", "--measure", str(count)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout.splitlines()[-1])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| questions | seconds of CPU | microseconds a question | highest memory (MiB) |",
        "|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['questions']:,} | {row['seconds']:,.1f} "
        f"| {1e6 * row['seconds'] / row['questions']:,.0f} | {row['peak_mib']:,.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure each size, or the one that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--measure", type=int, help="measure this size here, and print it")
    parser.add_argument("--profile", action="store_true", help="with --measure")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.profile)))
        return
    rows = []
    for count in arguments.sizes:
        rows.append(measure_apart(count, ROOT))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    temporary = FILE.with_name(f".{FILE.name}.{os.getpid()}")
    temporary.write_text(json.dumps({"tests": TESTS, "rows": rows}, indent=2) + "\n")
    temporary.replace(FILE)
    print(table(rows))


if __name__ == "__main__":
    main()

"""Measure an update by one and by several learner processes: seconds and memory.

    python -m benchmarks.processes                      # float32, gloo
    python -m benchmarks.processes --cases 1/2 2/2 4/2  # processes/threads that they share

The same trees and the same policy (random weights, some 30 million) in each case, in turns. One
process with several threads learns from as many forests at a time (lanes), each with gradients of
its own. Memory is that of the process that needs most: what stays between updates (weights, the
last gradients, the optimizer's state), less the resident memory before the policy was made, and
what an update adds at its peak. Beside both is what `make plan` counts for a process with one lane
(flows/host/gpu_memory.py). Prints a table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.memory import status, tree_of
from flows.host import gpu_cards, gpu_memory, model_shape
from params.schema.algorithms import load_algorithms
from params.schema.base import Machine
from params.schema.recipe import algorithm_of
from params.schema.reinforce import Update
from tasks import recipes
from tasks.learning import learner
from tasks.learning.algorithm import assemble
from tasks.learning.learner_group import Processes
from tasks.policy import checkpoint, resident, world

MIB = 2**20
VOCABULARY, TREES, LEAVES, SAMPLED = 8_192, 4, 8, 1_000  # sampled tokens of a tree
MICRO_BATCH = 1_024  # tokens of a pass
LEARNING = ("master weights", "gradients", "Adam's moments")  # what `make plan` calls it
ARCHITECTURE = Qwen2Config(
    vocab_size=VOCABULARY,
    hidden_size=512,
    intermediate_size=2_048,
    num_hidden_layers=7,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=1_024,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=None,
)
SETTINGS = Update(
    learning_rate=1e-5,
    warmup_updates=0,
    weight_decay=0.0,
    adam_betas=(0.9, 0.99),
    gradient_clip=1.0,
    epochs=1,
    mini_batches=1,
    micro_batch_tokens=MICRO_BATCH,
    critic_learning_rate=1e-5,
    recompute=False,
)


# ---------------------------------------------------------------- in each process


def load(machine: Machine) -> None:
    """Make the policy, and update once: gradients and optimizer state are there from now on."""
    before = status("VmRSS")
    torch.manual_seed(0)
    learning = resident.Learner(Path("processes"), Qwen2ForCausalLM(ARCHITECTURE), None)
    resident.POLICIES.learner = learning
    checkpoint.shard(learning)
    checkpoint.prepare_optimizer(learning, SETTINGS)
    learning.resident_before = before  # type: ignore[attr-defined]
    update(machine)


def update(machine: Machine) -> list[dict[str, float]]:
    """Update once; return seconds and bytes of each process."""
    learning: Any = resident.POLICIES.learner
    trees = [tree_of(VOCABULARY, SAMPLED, LEAVES) for _ in range(TREES)]
    loss = assemble(load_algorithms()["grpo"], SAMPLED).loss
    Path("/proc/self/clear_refs").write_text("5")  # the peak is of the update from here on
    stays = status("VmRSS")
    began, began_processor = time.perf_counter(), time.process_time()
    learner.optimize(learning, trees, loss, SETTINGS, 1.0, machine, 0)
    measured = {
        "wall": time.perf_counter() - began,
        "processor": time.process_time() - began_processor,
        "stays": stays - learning.resident_before,
        "adds": status("VmHWM") - stays,
    }
    return list(world.gathered(measured)) if world.size() > 1 else [measured]


# ---------------------------------------------------------------- all of them

Case = tuple[int, int]  # processes, and the threads that they share


def measure(cases: Sequence[Case], repeats: int) -> dict[Case, list[Any]]:
    """Return case -> what each process measured, an entry a repeat."""
    by_case: dict[Case, list[Any]] = {case: [] for case in cases}
    learners = {case: Processes(_machine(*case)) for case in cases}
    try:
        for case, processes in learners.items():
            processes.run(load, _machine(*case))
        for _ in range(repeats):
            for case, processes in learners.items():
                by_case[case].append(processes.run(update, _machine(*case)))
    finally:
        for processes in learners.values():
            processes.close()
    return by_case


def _machine(count: int, threads: int) -> Machine:
    return Machine(threads=threads, device="cpu", precision="float32", processes=count)


def planned(count: int) -> tuple[float, float]:
    """Return the bytes that `make plan` counts for a process: what stays, what an update adds."""
    recipe = recipes.load("tiny", Path("params"))
    reinforce = recipe.reinforce.model_copy(update={"update": SETTINGS})
    machine = _machine(count, count)
    recipe = recipe.model_copy(update={"reinforce": reinforce, "machine": machine})
    row = algorithm_of(recipe, Path("params"))
    shape = model_shape.shape_of(ARCHITECTURE)
    needed = gpu_memory.memory(recipe, row, shape, gpu_cards.CARDS["80"])
    learns = {name: size for name, size in needed.stays.items() if name in LEARNING}
    return sum(learns.values()), sum(needed.update.values())


def table(by_case: dict[Case, list[Any]]) -> str:
    """Return the measurements in Markdown; ratios are to the first case."""
    lines = [
        "| processes | threads | wall | processor | stays (MiB) | planned | adds (MiB) | planned |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    first = next(iter(by_case))
    for case, repeats in by_case.items():
        count, threads = case
        wall, processor = (_compared(by_case, case, first, kind) for kind in TIMES)
        stays, adds = (
            max(median(each[rank][name] for each in repeats) for rank in range(count)) / MIB
            for name in ("stays", "adds")
        )
        plan = [size / MIB for size in planned(count)]
        lines.append(
            f"| {count} | {threads} | {wall} | {processor} "
            f"| {stays:.0f} | {plan[0]:.0f} | {adds:.0f} | {plan[1]:.0f} |"
        )
    return "\n".join(lines)


TIMES: dict[str, Callable[[Iterable[float]], float]] = {"wall": max, "processor": sum}


def _compared(by_case: dict[Case, list[Any]], case: Case, first: Case, kind: str) -> str:
    """Return the median seconds of a case, and their ratio to those of the first one."""
    seconds, others = (
        [TIMES[kind](process[kind] for process in processes) for processes in by_case[one]]
        for one in (case, first)
    )
    ratios = [case_seconds / other for case_seconds, other in zip(seconds, others, strict=True)]
    return f"{median(seconds):.2f} s, {median(ratios):.2f}"


def _case(text: str) -> Case:
    processes, threads = map(int, text.split("/"))
    return processes, threads


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.processes")
    parser.add_argument("--cases", type=_case, nargs="+", default=[(1, 2), (1, 1), (2, 2)])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    print(table(measure(args.cases, args.repeats)))


if __name__ == "__main__":
    from benchmarks import processes  # the processes import its functions by this name

    processes.main()

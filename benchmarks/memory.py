"""Measure the memory of one update by sampled tokens, for a small and a large vocabulary.

    python -m benchmarks.memory

Each measurement is a process of its own: the highest resident memory while the update runs, less
the resident memory before it (weights, gradients, optimizer state, libraries). The learner computes
log-probabilities in parts; the plain form, for comparison, keeps a log-softmax over the whole
vocabulary. Writes benchmarks/memory.json and docs/memory_by_vocabulary.png.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from flows.tracking import run_figures
from params.schema.algorithms import load_algorithms
from params.schema.base import Machine
from params.schema.reinforce import Update
from tasks.learning import learner, passes
from tasks.learning.algorithm import assemble
from tasks.learning.packing import Credit, Credited
from tasks.policy import checkpoint, resident
from tasks.policy.machine import use_machine
from tasks.trees.tree import PROMPT, TURN, Node, Question, Tree

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("memory.json")
FIGURE = ROOT / "docs" / "memory_by_vocabulary.png"

VOCABULARIES = (2_048, 151_936)  # of the tiny policy's order, and Qwen2.5's
TOKENS = (512, 2_048, 8_192)  # sampled tokens of the one forward pass
HIDDEN, LAYERS, LEAVES = 64, 2, 16
PLAIN_COPIES = 4  # of all logits at the peak of the plain form
LIMIT = 5 * 2**30  # bytes: a plain form that needs more is not run
PARTS, PLAIN = "in parts", "plain"


# ---------------------------------------------------------------- one measurement


def plain_logprobs(
    model: Any, states_PH: Tensor, targets_P: Tensor, temperature: float, entropy: bool = False
) -> tuple[Tensor, None]:
    """Do the work of ``passes.token_logprobs`` with a log-softmax over all logits at once."""
    logits = model.get_output_embeddings()(states_PH).float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, targets_P[:, None])[:, 0], None


FORMS: dict[str, Callable[..., Any]] = {PARTS: passes.token_logprobs, PLAIN: plain_logprobs}


def small_learner(vocabulary: int, settings: Update) -> resident.Learner:
    """Return a policy with random weights and its optimizer."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=max(TOKENS),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    learning = resident.Learner(Path("memory"), Qwen2ForCausalLM(config), None)
    checkpoint.prepare_optimizer(learning, settings)
    return learning


def tree_of(vocabulary: int, tokens: int, leaves: int) -> Credited:
    """Return a tree of a short prompt and ``leaves`` turns with ``tokens`` tokens in all."""
    random = np.random.default_rng(0)
    nothing = np.zeros(0, np.float32)
    prompt = random.integers(0, vocabulary, 16).astype(np.int32)
    nodes = [Node(-1, PROMPT, "", "", prompt, nothing, nothing)]
    length = tokens // leaves
    for _ in range(leaves):
        drawn = random.integers(0, vocabulary, length).astype(np.int32)
        blank = np.zeros(length, np.float32)
        nodes.append(Node(0, TURN, "", "", drawn, blank, blank))
    tree = Tree(Question("q", "k", "t", ("1",)), nodes, list(range(1, leaves + 1)))
    signs = np.where(np.arange(leaves) % 2, -1.0, 1.0).astype(np.float32)
    credits = [Credit(np.full(length, sign), np.zeros(length, np.int64)) for sign in signs]
    return Credited(tree, credits)


def measure(form: str, vocabulary: int, tokens: int) -> int:
    """Return the bytes of one update beyond weights, gradients, optimizer state and libraries."""
    machine = Machine(threads=1, device="cpu", precision="float32")
    use_machine(machine)
    loss = assemble(load_algorithms()["grpo"], tokens).loss
    settings = Update(
        learning_rate=1e-4,
        warmup_updates=0,
        weight_decay=0.0,
        adam_betas=(0.9, 0.99),
        gradient_clip=1.0,
        epochs=1,
        mini_batches=1,
        micro_batch_tokens=2 * tokens + 1024,
        critic_learning_rate=1e-4,
        recompute=False,
    )
    learning = small_learner(vocabulary, settings)
    passes.token_logprobs = FORMS[form]

    def update(tree: Credited) -> None:
        learner.optimize(learning, [tree], loss, settings, 1.0, machine, 0)

    update(tree_of(vocabulary, 2, 2))  # gradients and optimizer state are there from now on
    tree = tree_of(vocabulary, tokens, LEAVES)
    # From here on, the peak is of the update: imports can take more, as when they compile.
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    update(tree)
    return status("VmHWM") - before


def status(name: str) -> int:
    """Return a number of bytes from this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


# ---------------------------------------------------------------- all of them


def measure_apart(form: str, vocabulary: int, tokens: int) -> int:
    """Call ``measure`` in a new process, whose allocator returns free memory at once."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "1000000",
        "MALLOC_TRIM_THRESHOLD_": "1000000",
    }
    command = [sys.executable, "-m", "benchmarks.memory", "--measure", form]
    ran = subprocess.run(
        [*command, str(vocabulary), str(tokens)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return int(ran.stdout)


def cases(vocabularies: Sequence[int], tokens: Sequence[int]) -> list[tuple[str, int, int]]:
    """Return form, vocabulary and tokens of every measurement below ``LIMIT``."""
    return [
        (form, vocabulary, count)
        for vocabulary in vocabularies
        for form in FORMS
        for count in tokens
        if form == PARTS or PLAIN_COPIES * 4 * vocabulary * count <= LIMIT
    ]


def row(form: str, vocabulary: int, tokens: int) -> dict[str, Any]:
    """Return one line of the table."""
    return {
        "form": form,
        "vocabulary": vocabulary,
        "tokens": tokens,
        "logits_mib": round(4 * vocabulary * tokens / 2**20, 1),
        "peak_mib": round(measure_apart(form, vocabulary, tokens) / 2**20, 1),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| log-probabilities | vocabulary | sampled tokens | all logits (MiB) | update (MiB) |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['form']} | {row['vocabulary']:,} | {row['tokens']:,} "
        f"| {row['logits_mib']:,.0f} | {row['peak_mib']:,.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def draw(rows: Sequence[dict[str, Any]]) -> Any:
    """Draw memory by sampled tokens, a line for each form and vocabulary."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4.2), dpi=run_figures.DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    vocabularies = sorted({row["vocabulary"] for row in rows})
    colors = dict(zip(vocabularies, (run_figures.BLUE, run_figures.VERMILION), strict=False))
    for vocabulary in vocabularies:
        for form, style in ((PARTS, "o-"), (PLAIN, "s--")):
            series = [row for row in rows if (row["form"], row["vocabulary"]) == (form, vocabulary)]
            axes.plot(
                [row["tokens"] for row in series],
                [row["peak_mib"] for row in series],
                style,
                color=colors[vocabulary],
                markerfacecolor=colors[vocabulary] if form == PARTS else "white",
                label=f"vocabulary {vocabulary:,}, {form}",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({row["tokens"] for row in rows})
    axes.set_xticks(ticks, [f"{count:,}" for count in ticks])
    axes.set_xlabel("sampled tokens of a forward pass", color=run_figures.INK)
    axes.set_ylabel("memory of the update (MiB)", color=run_figures.INK)
    axes.grid(color=run_figures.PALE, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, labelcolor=run_figures.INK, edgecolor="none")
    return figure


def main() -> None:
    """Make all measurements, or the one that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", nargs=3, metavar=("FORM", "VOCABULARY", "TOKENS"))
    arguments = parser.parse_args()
    if arguments.measure:
        form, vocabulary, tokens = arguments.measure
        print(measure(form, int(vocabulary), int(tokens)))
        return
    rows = []
    for case in cases(VOCABULARIES, TOKENS):
        rows.append(row(*case))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    measurements = {
        "hidden": HIDDEN,
        "layers": LAYERS,
        "logits_at_once": passes.LOGITS_AT_ONCE["cpu"],
        "rows": rows,
    }
    temporary = FILE.with_name(f".{FILE.name}.{os.getpid()}")
    temporary.write_text(json.dumps(measurements, indent=2) + "\n")
    temporary.replace(FILE)
    run_figures.save(draw(rows), FIGURE)
    print(table(rows))


if __name__ == "__main__":
    main()

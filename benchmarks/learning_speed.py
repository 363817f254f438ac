"""Measure how fast a policy learns on a CPU, in processor time of one thread, against a floor.

    python -m benchmarks.learning_speed FOLDER --precisions float32 bfloat16

FOLDER is a policy as transformers saves it. A step of the cold start has 16 traces of 150 tokens,
of which 75 are a system message that all share and 50 are learned. A step of an update has 4
questions with 8 trajectories of 70 tokens each, after the same system message and 25 tokens of the
question. Tokens are random, so that nothing else is shared. The floor of a step is what its matrix
products take at the fastest rate that is measured here with one thread: 6 operations for each
weight of the layers and each token that occurs once, and for each weight of the head and each
learned token. Attention, norms and the optimizer are above it.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.floors import matrix_rate
from params.schema.algorithms import load_algorithms
from params.schema.base import Machine
from params.schema.reinforce import Update
from tasks.learning import fine_tuning, gradients, learner
from tasks.learning.algorithm import assemble
from tasks.learning.packing import Credit, Credited, lay_out
from tasks.policy import checkpoint
from tasks.policy.load_model import load_policy
from tasks.policy.machine import use_machine
from tasks.policy.resident import Learner
from tasks.trees.tree import PROMPT, TURN, Node, Question, Tree

SYSTEM, TRACES, OBSERVED, LEARNED = 75, 16, 25, 50  # tokens, but the number of traces
QUESTIONS, LEAVES, ASKED, ANSWERED = 4, 8, 25, 70
SETTINGS = Update.model_construct(
    learning_rate=1e-5,
    warmup_updates=0,
    weight_decay=0.0,
    adam_betas=(0.9, 0.95),
    gradient_clip=1.0,
    epochs=1,
    mini_batches=1,
    micro_batch_tokens=8192,
    critic_learning_rate=1e-5,
    recompute=False,
)


def traces(vocabulary: int) -> list[Credited]:
    """Return the traces of a step of the cold start, as trees."""
    random = np.random.default_rng(0)
    system = random.integers(3, vocabulary, SYSTEM)
    rows = [
        {
            "question_id": f"q{number}",
            "tokens": [*system, *random.integers(3, vocabulary, OBSERVED + LEARNED)],
            "trained": [False] * (SYSTEM + OBSERVED) + [True] * LEARNED,
        }
        for number in range(TRACES)
    ]
    return [fine_tuning.tree_of(row) for row in rows]


def trees(vocabulary: int) -> list[Credited]:
    """Return the questions of an update, with an advantage for each trajectory."""
    random = np.random.default_rng(0)
    system = random.integers(3, vocabulary, SYSTEM).astype(np.int32)

    def node(parent: int, kind: str, tokens: np.ndarray) -> Node:
        known = np.full(len(tokens) if kind == TURN else 0, -1.0, np.float32)
        return Node(parent, kind, "", "", tokens.astype(np.int32), known, known)

    made = []
    for number in range(QUESTIONS):
        asked = np.concatenate([system, random.integers(3, vocabulary, ASKED)])
        turns = [node(0, TURN, random.integers(3, vocabulary, ANSWERED)) for _ in range(LEAVES)]
        nodes = [node(-1, PROMPT, asked), *turns]
        tree = Tree(Question(f"q{number}", "", "", ()), nodes, [*range(1, LEAVES + 1)])
        credits = [
            Credit(np.full(ANSWERED, value, np.float32), np.zeros(ANSWERED, np.int64))
            for value in random.standard_normal(LEAVES)
        ]
        made.append(Credited(tree, credits))
    return made


def operations(policy: Learner, batch: Sequence[Credited]) -> float:
    """Count the operations of the matrix products of a step, each different token once."""
    layout = lay_out([(tree, range(len(tree.credits))) for tree in batch])
    head = policy.model.get_output_embeddings().weight.numel()
    layers = sum(
        weight.numel() for weight in policy.model.base_model.layers.parameters() if weight.ndim > 1
    )
    return 6.0 * (layers * len(layout.tokens) + head * int(layout.sampled.sum()))


def seconds(work: Callable[[], object], repetitions: int) -> float:
    """Return the least processor seconds of several repetitions, after one that is not counted."""
    work()
    taken = []
    for _ in range(repetitions):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken)


def measure(folder: Path, precision: str, repetitions: int) -> None:
    """Print the rows of a precision, in Markdown."""
    given = {"threads": 1, "device": "cpu", "precision": precision, "processes": 1}
    machine = Machine.model_validate(given)
    use_machine(machine)
    rate = matrix_rate(precision)
    policy = Learner(folder, load_policy(folder, machine), None)
    policy.model.eval()
    checkpoint.prepare_optimizer(policy, SETTINGS)
    vocabulary = policy.model.config.get_text_config().vocab_size
    loss = assemble(load_algorithms()["grpo"], LEAVES).loss
    written, sampled = traces(vocabulary), trees(vocabulary)
    steps = {
        "cold start": (written, lambda: fine_tuning.imitate(policy, written, SETTINGS, machine)),
        "update": (
            sampled,
            lambda: learner.optimize(policy, sampled, loss, SETTINGS, 1.0, machine, seed=0),
        ),
    }
    for name, (batch, step) in steps.items():
        taken, floor = seconds(step, repetitions), operations(policy, batch) / rate
        print(
            f"| {name} | {precision} | {taken:.2f} | {floor:.2f} | {floor / taken:.0%} |",
            flush=True,
        )
    taken = seconds(lambda: gradients.apply_gradients(policy, SETTINGS), repetitions)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"| of them, clipping and AdamW | {precision} | {taken:.2f} | | |")
    print(f"{precision}: {rate / 1e9:.0f} GFLOP/s of one thread; peak so far {peak:.1f} GiB")


def main() -> None:
    """Measure each precision in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a policy")
    every = ["float32", "bfloat16"]
    parser.add_argument("--precisions", nargs="+", choices=every, default=every)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    print("| step | precision | processor seconds | floor | share of the floor |")
    print("|---|---|---|---|---|")
    for precision in arguments.precisions:
        measure(arguments.folder, precision, arguments.repetitions)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

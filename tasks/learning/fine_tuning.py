"""Supervised fine-tuning, in one process or in several that learn together. Torch only.

A trace is a tree of one leaf, and learned from as trees are: tokens that the traces of a step share
at their beginning, such as a system message, are computed once, and only tokens that the agent
learns to write have logits. Order, schedule and optimizer are those of transformers' ``Trainer``,
and so is the result, but for the rounding of sums and for dropout, which there is none of here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from params.schema.base import Machine
from params.schema.cold_start import ColdStart
from params.schema.reinforce import Update
from tasks.learning import gradients, passes
from tasks.learning.packing import Credit, Credited, Forest
from tasks.policy import checkpoint, resident
from tasks.trees.tables import read_rows
from tasks.trees.tree import PROMPT, RESULT, TURN, Node, Question, Tree

ADAM_BETAS, GRADIENT_CLIP = (0.9, 0.95), 1.0
Row = Mapping[str, Any]  # of the table of traces


@dataclass(frozen=True)
class FineTuning:
    """What decides a training: the table of traces, the settings, and the seed of their order."""

    traces: Path
    settings: ColdStart
    seed: int
    machine: Machine

    @cached_property
    def rows(self) -> list[Row]:
        """Return the traces."""
        return [*read_rows(self.traces)]

    @cached_property
    def units(self) -> list[list[int]]:
        """Return what is drawn as one trace: rows of an equal ``episode``, or a row alone."""
        units: dict[tuple[str, int], list[int]] = {}
        for index, row in enumerate(self.rows):
            episode = row.get("episode")
            units.setdefault(
                ("row", index) if episode is None else ("episode", episode), []
            ).append(index)
        return [*units.values()]


def begin() -> None:
    """Leave nothing in memory of what has learned here before."""
    resident.POLICIES.clear()


def train(policy: Path, training: FineTuning, end: int) -> list[float]:
    """Train the policy of a checkpoint, or the first one, until it has made ``end`` steps.

    It stays in memory and goes on there with the next call. Return the loss of each step.
    """
    rows, units = training.rows, training.units
    learning = _learner(policy, training)
    learning.changed = True
    learning.model.eval()  # without dropout, which trees cannot have
    losses = []
    for number in range(learning.updates, end):
        drawn = [units[unit] for unit in places(number, len(units), training)]
        trees = [tree_of(rows[index]) for unit in drawn for index in unit]
        settings = optimizer_settings(training.settings, number, rows)
        losses.append(imitate(learning, trees, settings, training.machine))
    resident.drop_gradients(learning)
    return losses


def save(policy: Path, training: FineTuning, end: int, folder: Path) -> None:
    """Write a checkpoint after ``end`` steps to ``folder``, from which training can go on.

    A process that was started since then repeats them.
    """
    train(policy, training, end)
    learning = resident.POLICIES.learner
    assert learning
    checkpoint.save(learning, folder)
    resident.POLICIES.keep(learning, folder / checkpoint.POLICY)


def finish(policy: Path, training: FineTuning, folder: Path) -> None:
    """Write the trained policy alone to ``folder``."""
    train(policy, training, training.settings.steps)
    learning = resident.POLICIES.learner
    assert learning
    checkpoint.save_policy(learning, folder)
    resident.POLICIES.clear()


def _learner(policy: Path, training: FineTuning) -> resident.Learner:
    """Return the policy as it learned last, or as its checkpoint has it."""
    learning = resident.POLICIES.learner
    if learning is None or learning.folder != policy:
        learning = resident.POLICIES.load_learner(policy, training.machine)
        checkpoint.shard(learning)
        settings = optimizer_settings(training.settings, 0, training.rows)
        checkpoint.prepare_optimizer(learning, settings)
    return learning


def places(number: int, count: int, training: FineTuning) -> list[int]:
    """Return which of ``count`` traces step ``number`` learns from.

    Each pass over the traces has an order of its own, and its last batch may be smaller, as with
    accelerate's ``SeedableRandomSampler``.
    """
    batch = training.settings.batch
    batches = -(-count // batch)  # of a pass
    generator = torch.Generator().manual_seed(training.seed + number // batches)
    order = torch.randperm(count, generator=generator).tolist()
    first = number % batches * batch
    return order[first : first + batch]


def learning_rate(settings: ColdStart, number: int) -> float:
    """Return the learning rate of step ``number``: it rises linearly, then falls as a cosine."""
    if number < settings.warmup_steps:
        return settings.learning_rate * number / settings.warmup_steps
    after = (number - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * after))


def optimizer_settings(settings: ColdStart, number: int, rows: Sequence[Row]) -> Update:
    """Return how step ``number`` learns; a pass has the tokens of ``micro_batch`` long traces."""
    return Update.model_construct(
        learning_rate=learning_rate(settings, number),
        warmup_updates=0,
        weight_decay=settings.weight_decay,
        adam_betas=ADAM_BETAS,
        gradient_clip=GRADIENT_CLIP,
        epochs=1,
        mini_batches=1,
        micro_batch_tokens=settings.micro_batch * max(len(row["tokens"]) for row in rows),
        critic_learning_rate=settings.learning_rate,
        recompute=False,
    )


def tree_of(row: Row) -> Credited:
    """Return a trace as a tree of one leaf; its own tokens have the advantage 1.

    The first token is never learned: nothing comes before it that could predict it.
    """
    trained = np.array(row["trained"], bool)
    trained[:1] = False
    ends = [*(np.flatnonzero(np.diff(trained)) + 1), len(trained)]
    nodes: list[Node] = []
    for first, end in zip([0, *ends], ends, strict=False):
        tokens = np.array(row["tokens"][first:end], np.int32)
        kind = TURN if trained[first] else RESULT if nodes else PROMPT
        measured = np.zeros(len(tokens) if kind == TURN else 0, np.float32)
        nodes.append(Node(len(nodes) - 1, kind, "", "", tokens, measured, measured))
    tree = Tree(Question(row["question_id"], "", "", ()), nodes, [len(nodes) - 1])
    count = int(trained.sum())
    return Credited(tree, [Credit(np.ones(count, np.float32), np.zeros(count, np.int64))])


def imitate(
    learning: resident.Learner, trees: Sequence[Credited], settings: Update, machine: Machine
) -> float:
    """Take one optimizer step on traces; return the mean of -log pi over the traces' own tokens."""
    trees = [tree for tree in trees if any(len(credit.advantages) for credit in tree.credits)]
    tokens = max(1, sum(len(credit.advantages) for tree in trees for credit in tree.credits))

    def share(forest: Forest) -> tuple[Tensor, dict[str, float]]:
        logprobs = passes.forest_logprobs(learning.model, forest, 1.0, machine)
        return -logprobs[forest.entries][forest.views][forest.mask].sum() / tokens, {}

    metrics_of_forests = gradients.accumulate(learning, trees, share, settings, machine)
    gradients.apply_gradients(learning, settings, "cold_start.learning_rate, or look at the traces")
    return math.fsum(metrics["loss"] for metrics in metrics_of_forests)

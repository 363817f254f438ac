"""update: the policy takes its optimizer steps on one batch of credited trees."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from prefect import task

from params.schema.algorithms import Algorithm
from params.schema.base import Machine
from params.schema.reinforce import Lora, Update
from tasks.learning import learner, token_values
from tasks.learning.algorithm import assemble
from tasks.learning.packing import ByNode, Credit, Credited
from tasks.ledger import prefect_cache, substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import Step
from tasks.policy import checkpoint, resident
from tasks.trees.tables import load_trees, read_rows, write_table


@dataclass(frozen=True)
class UpdateInputs:
    """What decides an update: the policy, an iteration's credited trees, and how it learns.

    ``critic`` and the state of the ``optimizer`` lie beside ``policy``, from where they are read.
    """

    policy: Artifact
    sampler: Artifact  # the policy that sampled the trees: an earlier one, if it sampled ahead
    staleness: int  # optimizer steps from that policy to ``policy``
    optimizer: Artifact | None  # None before the first update
    critic: Artifact | None  # None where the algorithm has none, and before the first update
    reference: Artifact | None  # the policy that a KL penalty in the loss compares with, or None
    trees: list[Artifact]
    advantages: Artifact
    algorithm: Algorithm
    settings: Update
    temperature: float  # of the rollout
    response_tokens: int  # the budget of a response
    machine: Machine
    lora: Lora | None  # the first update freezes the policy, and makes an adapter of it


@task(**prefect_cache.TASK_OPTIONS)
@substeps.recorded
def update(
    step: Step, inputs: UpdateInputs, *, make_room: Callable[[], object] = lambda: None
) -> Record:
    """Update the policy on one batch; artifacts ``policy``, ``optimizer``, and maybe ``critic``.

    A further one, ``tokens``, is a table of what the loss saw of each token
    (tasks/learning/token_values.py).

    ``make_room`` drops old checkpoints right before the new one is written: the disk never holds
    one too many, and the new one takes the memory that the old one's files had.
    """
    began = time.perf_counter()
    learning = _learner(step, inputs)
    batch = _batch(learning, inputs)
    loss = assemble(inputs.algorithm, inputs.response_tokens).loss
    draws = (step.seed, step.iteration)
    seen: token_values.Seen = {}
    metrics = learner.optimize(
        learning, batch, loss, inputs.settings, inputs.temperature, inputs.machine, draws, seen
    )
    metrics["staleness"] = float(inputs.staleness)
    resident.drop_gradients(learning)
    trained = time.perf_counter()
    make_room()
    checkpoint.save(learning, step.out)
    write_table(token_values.table(seen), step.out / "tokens.parquet")
    resident.POLICIES.keep(learning, step.final() / checkpoint.POLICY)
    seconds = {"update": trained - began, "checkpoint": time.perf_counter() - trained}
    questions = [tree.tree.question.id for tree in batch]
    return {"metrics": metrics, "seconds": seconds, "questions": questions}


def _learner(step: Step, inputs: UpdateInputs) -> resident.Learner:
    """Return the policy with its critic, adapter and optimizer, as the last update left them."""
    learning = resident.POLICIES.load_learner(Path(inputs.policy.path), inputs.machine)
    checkpoint.prepare_critic(learning, inputs.algorithm.critic, inputs.machine)
    checkpoint.prepare_adapter(learning, inputs.lora, inputs.policy, step.seed)
    checkpoint.prepare_optimizer(learning, inputs.settings)
    return learning


def _batch(learning: resident.Learner, inputs: UpdateInputs) -> list[Credited]:
    """Return the credited trees with what the loss needs of other policies than the learning one.

    These are the log-probabilities of the reference and, for trees that were sampled ahead, of the
    policy that sampled them: the ratio and its clip range hold against that one.
    """
    batch = _credited(inputs.trees, inputs.advantages)
    if inputs.reference:
        known = _node_logprobs(batch, learning, inputs.reference, inputs)
        batch = [
            replace(tree, reference_logprobs=of) for tree, of in zip(batch, known, strict=True)
        ]
    if inputs.sampler != inputs.policy:
        known = _node_logprobs(batch, learning, inputs.sampler, inputs)
        batch = [replace(tree, old_logprobs=of) for tree, of in zip(batch, known, strict=True)]
    return batch


def _node_logprobs(
    batch: Sequence[Credited], learning: resident.Learner, policy: Artifact, inputs: UpdateInputs
) -> list[ByNode]:
    """Return log-probabilities of the sampled tokens under a policy: tree -> node -> tokens."""
    with resident.POLICIES.reference_of(Path(policy.path), learning, inputs.machine) as model:
        return learner.node_logprobs(
            model, batch, inputs.temperature, inputs.settings, inputs.machine
        )


def _credited(trees: Sequence[Artifact], advantages: Artifact) -> list[Credited]:
    """Return the trees that the group filter has kept, each with the credit of its leaves."""
    credits: dict[str, list[Credit]] = {}
    for entry in sorted(read_rows(Path(advantages.path)), key=lambda entry: entry["leaf"]):
        if entry["kept"]:
            credits.setdefault(entry["question"], []).append(_credit(entry))
    return [
        Credited(tree, credits[tree.question.id])
        for artifact in trees
        for tree in load_trees(Path(artifact.path))
        if tree.question.id in credits
    ]


def _credit(entry: Mapping[str, Any]) -> Credit:
    def floats(name: str) -> Any:
        return None if entry[name] is None else np.array(entry[name], np.float32)

    return Credit(
        advantages=floats("advantages"),
        segments=np.array(entry["segments"], np.int64),
        returns=floats("returns"),
        values=floats("values"),
    )

"""update: the policy takes its optimizer steps on one batch of credited trees."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from prefect import task

from params.schema.algorithms import Algorithm
from params.schema.base import Machine
from params.schema.reinforce import Lora, Update
from tasks.learning import learner
from tasks.learning.algorithm import assemble
from tasks.learning.packing import Credit, Credited
from tasks.ledger import prefect_cache, substeps
from tasks.ledger.artifacts import Artifact, Step
from tasks.policy import checkpoint, resident
from tasks.trees.tables import load_trees, read_rows


@task(**prefect_cache.TASK_OPTIONS)
@substeps.recorded
def update(
    step: Step,
    folder: Path,
    *,
    policy: Artifact,
    optimizer: Artifact | None,
    critic: Artifact | None,
    reference: Artifact | None,
    trees: list[Artifact],
    advantages: Artifact,
    row: Algorithm,
    settings: Update,
    temperature: float,
    response_tokens: int,
    machine: Machine,
    lora: Lora | None,
    make_room: Callable[[], object] = lambda: None,
) -> Mapping[str, Any]:
    """One batch's updates; artifacts ``policy``, ``optimizer``, and ``critic`` where there is one.

    ``critic`` and the state of the ``optimizer`` lie beside ``policy``, from where they are read:
    None where the policy has none yet, or the algorithm no critic. ``reference`` is the policy that
    a KL penalty in the loss looks at; None where the algorithm has no such penalty. With ``lora``
    the first update freezes ``policy``, and what it makes is an adapter of it. ``make_room``
    drops old checkpoints right before the new one is written: the disk never holds one too many,
    and the new one takes the memory that the old one's files had.
    """
    began = time.perf_counter()
    learning = resident.load_learner(Path(policy.path), machine)
    checkpoint.prepare_critic(learning, row.critic, machine)
    checkpoint.prepare_adapter(learning, lora, policy, step.seed)
    checkpoint.prepare_optimizer(learning, settings)
    batch = _credited(trees, advantages)
    if reference:
        with resident.reference_of(Path(reference.path), learning, machine) as model:
            known = learner.node_logprobs(model, batch, temperature, settings, machine)
        batch = [
            replace(tree, reference_logprobs=logprobs)
            for tree, logprobs in zip(batch, known, strict=True)
        ]
    loss = assemble(row, response_tokens).loss
    metrics = learner.optimize(
        learning, batch, loss, settings, temperature, machine, (step.seed, step.iteration)
    )
    resident.drop_gradients(learning)
    trained = time.perf_counter()
    make_room()
    checkpoint.save(learning, folder)
    resident.keep_resident(learning, substeps.final_place(folder) / checkpoint.POLICY)
    seconds = {"update": trained - began, "checkpoint": time.perf_counter() - trained}
    questions = [tree.tree.question.id for tree in batch]
    return {"metrics": metrics, "seconds": seconds, "questions": questions}


def _credited(trees: Sequence[Artifact], advantages: Artifact) -> list[Credited]:
    """The trees that the group filter has kept, each with the credit of its leaves."""
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

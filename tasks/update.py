"""update: the policy takes its optimizer steps on one batch of credited trees."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import task

from params.schema import Machine, Update
from tasks import checkpoint, learner, ledger
from tasks.algorithm import Row, assemble
from tasks.ledger import Artifact, Step
from tasks.packing import Row as LeafRow
from tasks.packing import row as leaf_row
from tasks.trajectory import load_trees, read_rows


@task(**ledger.TASK_OPTIONS)
@ledger.recorded
def update(
    step: Step,
    folder: Path,
    *,
    policy: Artifact,
    trees: Artifact,
    advantages: Artifact,
    row: Row,
    settings: Update,
    temperature: float,
    machine: Machine,
) -> Mapping[str, Any]:
    """One batch's updates; artifacts ``policy`` and ``optimizer``."""
    began = time.perf_counter()
    learning = checkpoint.resident(Path(policy.path), machine)
    checkpoint.prepare_optimizer(learning, settings)
    rows = _leaf_rows(trees, advantages)
    loss = assemble(row).loss
    metrics = learner.update(
        learning, rows, loss, settings, temperature, machine, (step.seed, step.iteration)
    )
    trained = time.perf_counter()
    checkpoint.save(learning, folder)
    checkpoint.keep_resident(learning, ledger.final_place(folder) / checkpoint.POLICY)
    seconds = {"update": trained - began, "checkpoint": time.perf_counter() - trained}
    return {"metrics": metrics, "seconds": seconds}


def _leaf_rows(trees: Artifact, advantages: Artifact) -> list[LeafRow]:
    credit = {
        (entry["question"], entry["leaf"]): entry["advantage"]
        for entry in read_rows(Path(advantages.path))
    }
    return [
        leaf_row(trajectory, credit[tree.question.id, leaf])
        for tree in load_trees(Path(trees.path))
        for leaf, trajectory in enumerate(tree.trajectories())
    ]

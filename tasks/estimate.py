"""estimate: the reward model says how likely each trajectory of a batch is a success."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from params.schema.base import Machine
from tasks.learning import outcome
from tasks.ledger import substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.policy.outcome_model import SCORING
from tasks.trees.tables import load_trees, write_table

TABLE = pa.schema(
    {
        "question": pa.string(),
        "leaf": pa.int32(),
        "estimate": pa.float64(),  # calibrated probability of success
    }
)


@dataclass(frozen=True)
class EstimateInputs:
    """What decides the estimates of a batch."""

    model: Artifact
    trees: Artifact
    micro_batch_tokens: int  # most tokens of a forward pass
    machine: Machine


@substeps.recorded
def estimate(step: SubStep, inputs: EstimateInputs) -> Record:
    """Score each leaf; artifact ``estimates``, a row a leaf."""
    began = time.perf_counter()
    trees = load_trees(Path(inputs.trees.path))
    model = SCORING.load(Path(inputs.model.path), inputs.machine)
    every = [(index, leaf) for index, tree in enumerate(trees) for leaf in range(len(tree.leaves))]
    logits = outcome.logits_of(model, trees, every, inputs.micro_batch_tokens, inputs.machine)
    values = model.calibration.probabilities(logits).tolist()
    rows = [
        {"question": trees[index].question.id, "leaf": leaf, "estimate": value}
        for (index, leaf), value in zip(every, values, strict=True)
    ]
    write_table(pa.Table.from_pylist(rows, schema=TABLE), step.out / "estimates.parquet")
    return {"metrics": {}, "seconds": {"estimate": time.perf_counter() - began}}

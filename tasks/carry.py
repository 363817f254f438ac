"""carry: groups that one iteration has sampled and not needed, for the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.ledger import substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.trees.tables import load_trees, save_trees, write_table


@dataclass(frozen=True)
class CarryInputs:
    """What decides the batch: trees of the iteration before with their rewards, and a choice."""

    trees: list[Artifact]
    rewards: list[Artifact]
    parts: list[Artifact]  # of the rewards
    questions: tuple[str, ...]  # whose groups are carried


@substeps.recorded
def carry(step: SubStep, inputs: CarryInputs) -> Record:
    """Copy some groups into a batch of their own; artifacts ``trees``, ``rewards``, ``parts``."""
    every = [tree for table in inputs.trees for tree in load_trees(Path(table.path))]
    save_trees([tree for tree in every if tree.question.id in inputs.questions], step.out / "trees")
    for name in ("rewards", "parts"):
        table = _rows_of(getattr(inputs, name), inputs.questions)
        write_table(table, step.out / f"{name}.parquet")
    return {"metrics": {}, "seconds": {}, "questions": list(inputs.questions)}


def _rows_of(tables: Sequence[Artifact], questions: Sequence[str]) -> pa.Table:
    whole = pa.concat_tables([pq.read_table(table.path) for table in tables])
    return whole.filter(pc.is_in(whole["question"], pa.array(questions, pa.string())))

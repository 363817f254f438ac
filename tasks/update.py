"""update: the policy takes its optimizer steps on one batch of credited trees."""

from __future__ import annotations

import time
from collections.abc import Callable

from tasks.learning import batch
from tasks.learning.batch import UpdateInputs
from tasks.learning.learner_group import HERE, Learners
from tasks.ledger import substeps
from tasks.ledger.artifacts import Record
from tasks.ledger.substeps import SubStep
from tasks.trees.tables import write_table


@substeps.recorded
def update(
    step: SubStep,
    inputs: UpdateInputs,
    *,
    make_room: Callable[[], object] = lambda: None,
    learners: Learners = HERE,
) -> Record:
    """Update the policy on one batch; artifacts ``policy``, ``optimizer``, and maybe ``critic``.

    A further one, ``tokens``, is a table of what the loss saw of each token
    (tasks/learning/token_values.py).

    ``make_room`` drops old checkpoints right before the new one is written: the disk never holds
    one too many, and the new one takes the memory that the old one's files had. ``learners`` is
    where the policy learns.
    """
    began = time.perf_counter()
    update_of = (inputs, step.seed, (step.seed, step.iteration))
    updated = learners.run(batch.update, *update_of)
    trained = time.perf_counter()
    if updated.price and step.iteration == 0:
        print(f"update: {updated.price}", flush=True)
    make_room()
    learners.run(batch.save, *update_of, step.out, step.final())
    write_table(updated.tokens, step.out / "tokens.parquet")
    seconds = {"update": trained - began, "checkpoint": time.perf_counter() - trained}
    return {
        "metrics": updated.metrics,
        "seconds": seconds,
        "questions": updated.questions,
    }

"""cold_start: supervised fine-tuning on traces, on the agent's own tokens only."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from params.schema.base import Machine
from params.schema.cold_start import ColdStart
from tasks.learning import fine_tuning
from tasks.learning.learner_group import HERE, Learners
from tasks.learning.progress import Advance, no_advance
from tasks.ledger import artifacts, substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.policy import checkpoint
from tasks.policy.machine import use_machine
from tasks.trees.tables import read_rows

POINTS = 50  # of the curve
CHECKPOINTS = 2  # that are kept
LOSSES = "losses.json"  # in a checkpoint: those of its steps

Point = dict[str, Any]  # of the curve: step, loss, learning_rate


@dataclass(frozen=True)
class ColdStartInputs:
    """What decides the fine-tuned policy."""

    policy: Artifact
    traces: Artifact
    settings: ColdStart
    machine: Machine


@substeps.recorded
def cold_start(
    step: SubStep,
    inputs: ColdStartInputs,
    *,
    advance: Advance = no_advance,
    learners: Learners = HERE,
) -> Record:
    """Fine-tune the policy on the traces; artifact ``policy``.

    A killed training goes on at its newest whole checkpoint. ``advance`` is called with the steps
    done so far and the newest loss. ``learners`` is where the policy learns: several processes
    learn as one does, but for the rounding of sums.
    """
    began = time.perf_counter()
    use_machine(inputs.machine)
    curve = _train(step, inputs, advance, learners)
    rows = read_rows(Path(inputs.traces.path))
    return {
        "metrics": {"loss": curve[-1]["loss"]},
        "curve": curve,
        "seconds": {"training": time.perf_counter() - began},
        "questions": sorted({row["question_id"] for row in rows}),
        "cursor": inputs.settings.steps * inputs.settings.batch,  # traces that have been passed
    }


def _train(
    step: SubStep, inputs: ColdStartInputs, advance: Advance, learners: Learners
) -> list[Point]:
    """Train where the policy learns, and write the policy; return the curve."""
    settings, scratch = inputs.settings, step.ledger.scratch(step)
    training = fine_tuning.FineTuning(Path(inputs.traces.path), settings, step.seed, inputs.machine)
    policy, losses = _resumed(scratch, Path(inputs.policy.path))
    learners.run(fine_tuning.begin)
    for end in _stops(settings, len(losses), inputs.machine):
        losses += learners.run(fine_tuning.train, policy, training, end)[len(losses) - end :]
        advance(end, {"loss": losses[-1]})
        if end % settings.save_every == 0 and end < settings.steps:
            folder = scratch / f"checkpoint-{end}"
            artifacts.remove(folder)
            learners.run(fine_tuning.save, policy, training, end, folder)
            (folder / LOSSES).write_text(json.dumps(losses))
            substeps.drop_old_checkpoints(scratch, CHECKPOINTS)
            step.ledger.seal(folder)
            policy = folder / checkpoint.POLICY
    learners.run(fine_tuning.finish, policy, training, step.out / checkpoint.POLICY)
    return _curve(losses, settings)


def _resumed(scratch: Path, first: Path) -> tuple[Path, list[float]]:
    """Return the policy to go on with, and the losses of the steps that it has made."""
    newest = substeps.newest_checkpoint(scratch)
    if newest is None:
        return first, []
    return newest / checkpoint.POLICY, json.loads((newest / LOSSES).read_text())


def _steps_of_a_point(settings: ColdStart) -> int:
    return max(1, settings.steps // POINTS)


def _stops(settings: ColdStart, done: int, machine: Machine) -> list[int]:
    """Return the numbers of steps at which training reports or writes a checkpoint.

    Several processes, which read the traces at each call, report only the points of the curve.
    """
    every = 1 if machine.processes == 1 else _steps_of_a_point(settings)
    stops = {*range(0, settings.steps, every), *range(0, settings.steps, settings.save_every)}
    return sorted(stop for stop in {*stops, settings.steps} if stop > done)


def _curve(losses: Sequence[float], settings: ColdStart) -> list[Point]:
    """Return a point of every so many steps: the mean loss since the one before."""
    every = _steps_of_a_point(settings)
    return [
        {
            "step": end,
            "loss": math.fsum(losses[end - every : end]) / every,
            "learning_rate": fine_tuning.learning_rate(settings, end - 1),
        }
        for end in range(every, settings.steps + 1, every)
    ]

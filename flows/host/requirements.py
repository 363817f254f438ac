"""Check that this machine has what the stages of a recipe need: engine, device, GPUs.

A stage checks it for itself when it starts; a run checks it for all stages before the first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from flows.host import disk, gpu
from params.schema.recipe import Recipe
from tasks.engines import ENGINES
from tasks.learning.learner_group import LAUNCH
from tasks.questions.sampled import Sampled

ELSEWHERE = (
    " with a policy that a CPU trains in time, or let a worker with a GPU run it "
    "(docs/deployments.md); `beamline plan` says which cards suffice, and needs none"
)
PROBE = "tasks.policy.device"
SECONDS = 120.0  # for the probe: torch takes seconds to import, and a cold GPU as long to answer


@dataclass(frozen=True)
class Devices:
    """What torch says of the devices of this machine."""

    fault: str | None  # why it cannot compute there
    count: int


def check(name: str, recipe: Recipe, stages: Collection[str] = disk.STAGES) -> None:
    """Raise ValueError with all that this machine lacks for these stages of a recipe."""
    if lacking := faults(recipe, os.environ, stages):
        raise ValueError("\n".join(f"params/{name}.yaml: {fault}" for fault in lacking))


def faults(
    recipe: Recipe, environment: Mapping[str, str], stages: Collection[str] = disk.STAGES
) -> list[str]:
    """Return what this machine lacks for these stages ("reinforce"), each with its remedy."""
    return [*_of_engine(recipe, stages), *_of_device(recipe, environment, stages)]


def _of_engine(recipe: Recipe, stages: Collection[str]) -> list[str]:
    """Return why the engine that these stages need is not here, with the remedy."""
    engine = recipe.engine
    if not any(samples(stage, recipe) for stage in stages):
        return []
    missing = ENGINES[engine.kind].installed(engine)
    return [f"'engine.kind' = {engine.kind!r}, {missing}"] if missing else []


def samples(stage: str, recipe: Recipe) -> bool:
    """Return whether a stage needs the engine.

    ``prepare`` does where it samples its traces, and ``reward_model`` where the recipe has one.
    """
    conditions = {
        "prepare": isinstance(recipe.prepare.expert, Sampled),
        "reward_model": recipe.reward_model is not None,
        "reinforce": True,
        "evaluate": True,
    }
    return conditions.get(stage, False)


def computes_here(stage: str, recipe: Recipe, environment: Mapping[str, str]) -> bool:
    """Return whether a stage computes on the device of this machine.

    Not where a command starts its learner processes, which may be on other machines, nor where
    servers sample.
    """
    learns = stage in gpu.LEARNING and not (recipe.machine.processes > 1 and LAUNCH in environment)
    scores = stage == "reward_model" and recipe.reward_model is not None
    return learns or scores or (samples(stage, recipe) and not recipe.engine.addresses)


def _of_device(
    recipe: Recipe, environment: Mapping[str, str], stages: Collection[str]
) -> Iterator[str]:
    device = recipe.machine.device
    here = [stage for stage in stages if computes_here(stage, recipe, environment)]
    if device == "cpu" or not here:
        return
    devices = _devices(device)
    if devices.fault:
        yield f"'machine.device' = {device!r}: {devices.fault}{ELSEWHERE}"
        return
    learning = any(stage in gpu.LEARNING for stage in here)
    needed = recipe.machine.processes if learning else 1
    count = len(gpu.visible()) or devices.count
    if count < needed:
        yield gpu.too_few(needed, count)


def _devices(device: str) -> Devices:
    """Ask torch, in a process of its own: a process that has used a GPU cannot be forked."""
    command = [sys.executable, "-m", PROBE, device]
    try:
        asked = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Devices(f"torch did not answer in {SECONDS:.0f} s: does nvidia-smi answer?", 0)
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["nothing was printed"])[-1]
        return Devices(f"torch cannot be asked ({last}): repair the installation", 0)
    answer = json.loads(asked.stdout.splitlines()[-1])
    return Devices(answer["fault"], answer["devices"])

"""Estimate the disk space that a run needs at most, and check that it is free and granted.

Counted are the ledger and the stages' outs (DVC's cache links to them): weights of four bytes a
parameter, optimizer states of twice that, trees and the values of their tokens. It is an upper
bound: all responses have their maximal length, and nothing is compressed.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection
from dataclasses import dataclass

from safetensors import safe_open

from params.run_folders import RunFolders
from params.schema.algorithms import MOST_BATCHES, Algorithm
from params.schema.prepare import Policy, TinyPolicy
from params.schema.recipe import Recipe
from params.schema.reinforce import Lora, Reinforce
from params.schema.reward_model import RewardModel
from tasks.ledger import artifacts
from tasks.questions.sampled import Sampled

GIB = 2**30
WEIGHT = 4  # bytes of a parameter; AdamW keeps two more values of each
CHECKPOINT = 3  # weights and optimizer state, in multiples of the weights
TOKEN = 32  # bytes: id, logprob, entropy, text; advantage, segment, return and value
PARTS = ("weights", "optimizers", "trees")  # what stays
REMEDY = (
    "raise reinforce.keep.weights_every, lower reinforce.keep.optimizer_last or "
    "reinforce.iterations"
)
FULL = 2**20  # bytes: with less free space the disk counts as full
STAGES = (
    "prepare",
    "champion",
    "cold_start",
    "reward_model",
    "reinforce",
    "evaluate",
    "verdict",
)


@dataclass(frozen=True)
class Need:
    """Bytes that a stage needs at most: what stays when it has ended, and temporary space."""

    weights: int = 0
    optimizers: int = 0
    trees: int = 0
    passing: int = 0

    @property
    def lasting(self) -> int:
        return self.weights + self.optimizers + self.trees


def needs(
    recipe: Recipe, row: Algorithm, weights: int, learned: int | None = None
) -> dict[str, Need]:
    """Return what each stage needs.

    weights: bytes of the policy's weights. learned: bytes of those that reinforcement learning
    changes and keeps; None for all of them.
    """
    critic = row.critic is not None and row.critic.backbone == "own"
    one = (weights if learned is None else learned) + critic * weights
    settings, tokens = recipe.reinforce, recipe.dialogue.path_tokens
    batches = 1 if row.group_filter == "none" else MOST_BATCHES
    leaves = settings.iterations * batches * settings.questions * settings.rollout.leaves
    of_each = recipe.evaluate.questions * recipe.evaluate.samples
    answers = 3 * of_each  # cold start, candidate, and a champion
    full = min(settings.keep.optimizer_last, settings.iterations)
    return {
        "prepare": Need(weights=2 * weights, trees=_sampled_traces(recipe) * tokens * TOKEN),
        "champion": Need(weights=weights),
        "cold_start": _cold_start(recipe, weights),
        "reward_model": _reward_model(recipe, weights),
        "reinforce": Need(
            weights=_kept(settings) * one + 2 * weights + _kept_models(recipe) * weights,
            optimizers=full * (CHECKPOINT - 1) * one,
            # in the ledger and in the out, and in each part of a rollout that policies share
            trees=(1 + settings.samplers) * leaves * tokens * TOKEN,
            # the policy is written whole before it stays, and then the reward model learns
            passing=max(CHECKPOINT * one, _passing_models(recipe, weights)),
        ),
        "evaluate": Need(trees=answers * tokens * TOKEN),
        "verdict": Need(),
    }


def _sampled_traces(recipe: Recipe) -> int:
    """Return how many answers are sampled for traces; 0 where their number is not known yet."""
    expert, rows = recipe.prepare.expert, recipe.prepare.questions.rows()
    if not isinstance(expert, Sampled):
        return 0
    return expert.attempts * (expert.questions or (rows["train"] if rows else 0))


def _cold_start(recipe: Recipe, weights: int) -> Need:
    """Return the need of the cold start; without one, the first policy is copied."""
    if recipe.cold_start is None:
        return Need(weights=weights)
    # the trainer keeps two checkpoints, and writes a third before it removes the oldest
    return Need(weights=2 * weights, passing=3 * CHECKPOINT * weights)


def _reward_model(recipe: Recipe, weights: int) -> Need:
    """Return the need of the reward model: in the ledger and as an out, with its labelled trees."""
    reward_model, tokens = recipe.reward_model, recipe.dialogue.path_tokens
    if reward_model is None:
        return Need()
    leaves = reward_model.questions * recipe.reinforce.rollout.leaves
    return Need(
        weights=2 * weights,
        trees=2 * leaves * tokens * TOKEN,
        passing=_checkpoints(reward_model, reward_model.steps) * CHECKPOINT * weights,
    )


def _checkpoints(reward_model: RewardModel, steps: int) -> int:
    """Return how many checkpoints of a training exist at once: two, and a third being written."""
    return min(3, (steps - 1) // reward_model.save_every)  # there is none of the last step


def _passing_models(recipe: Recipe, weights: int) -> int:
    """Return the bytes of the checkpoints of the reward model in reinforcement learning."""
    reward_model = recipe.reward_model
    if reward_model is None or reward_model.again is None:
        return 0
    return _checkpoints(reward_model, reward_model.again.steps) * CHECKPOINT * weights


def _kept_models(recipe: Recipe) -> int:
    """Return how many reward models of reinforcement learning exist at most."""
    reward_model, settings = recipe.reward_model, recipe.reinforce
    if reward_model is None or reward_model.again is None:
        return 0
    trainings = settings.iterations // reward_model.again.every
    kept_models = settings.iterations // math.lcm(
        reward_model.again.every, settings.keep.weights_every
    )
    return min(trainings, kept_models + 2 + settings.ahead)


def _kept(settings: Reinforce) -> int:
    """Return how many iterations' weights exist at most: the kept ones and the newest.

    The newest are those of the recipe, and the policies by which batches that wait were sampled.
    """
    keep, iterations = settings.keep, settings.iterations
    newest = max(keep.optimizer_last, 1 + settings.ahead)
    return min(iterations, iterations // keep.weights_every + newest)


def weights_of(name: str, policy: Policy) -> int | None:
    """Return the bytes of a recipe's policy, of the initial one or computed; None if unknown."""
    initial = RunFolders(name).initial
    if initial.is_dir():
        size = sum(file.stat().st_size for file in initial.glob("*.safetensors"))
        half = "float16" in json.loads((initial / "config.json").read_text()).get("dtype", "")
        return size * (2 if half else 1)  # float16 and bfloat16 are trained as float32
    return WEIGHT * parameters(policy) if isinstance(policy, TinyPolicy) else None


def adapter_of(name: str, lora: Lora) -> int | None:
    """Return the bytes of an adapter of a recipe's policy; None if there is no policy yet."""
    files = [*RunFolders(name).initial.glob("*.safetensors")]
    adapted = tuple(f".{module}.weight" for module in lora.modules)
    sides = 0
    for file in files:
        with safe_open(file, "numpy") as stored:
            names = [name for name in stored.keys() if name.endswith(adapted)]  # noqa: SIM118
            sides += sum(sum(stored.get_slice(name).get_shape()) for name in names)
    return WEIGHT * lora.rank * sides if files else None


def parameters(policy: TinyPolicy) -> int:
    """Count the parameters of a Qwen2 policy with tied embeddings, at most."""
    hidden, shared = policy.hidden, policy.hidden // policy.heads * policy.key_value_heads
    attention = 2 * hidden * (hidden + shared) + hidden + 2 * shared
    layer = attention + 3 * hidden * policy.feed_forward + 2 * hidden
    return policy.vocabulary * hidden + policy.layers * layer + hidden


def check(name: str, recipe: Recipe, row: Algorithm, stages: Collection[str] = STAGES) -> None:
    """Raise ValueError if the disk has, or the recipe grants, too little space for these stages.

    A policy that is still to be downloaded has an unknown size: the check is then made by the
    stages after `prepare`.
    """
    weights = weights_of(name, recipe.prepare.policy)
    if weights is None:
        return
    learned = adapter_of(name, recipe.lora) if recipe.lora else None
    every = needs(recipe, row, weights, learned)
    left = {stage: every[stage] for stage in stages}
    further = sum(max(0, need.lasting - held(name, stage)) for stage, need in left.items())
    further += max((need.passing for need in left.values()), default=0)
    where = (
        f"params/{name}.yaml: the run may need {_gib(further)} GiB more on disk ("
        + ", ".join(
            f"{part} {_gib(sum(getattr(n, part) for n in left.values()))}" for part in PARTS
        )
        + ")"
    )
    free = shutil.disk_usage(".").free
    if further > free:
        raise ValueError(f"{where}, and {_gib(free)} GiB are free: make room, or {REMEDY}")
    granted, there = recipe.machine.disk_gib, sum(held(name, stage) for stage in STAGES)
    if granted is not None and there + further > granted * GIB:
        raise ValueError(
            f"{where} beside {_gib(there)} GiB that are there, and machine.disk_gib grants "
            f"{granted:g}: raise it, or {REMEDY}"
        )


def is_full() -> bool:
    """Return whether the disk is full; each library reports that with another error."""
    return shutil.disk_usage(".").free < FULL


def held(name: str, stage: str) -> int:
    """Return the bytes that a stage has in the ledger."""
    folder = artifacts.ROOT / name / stage
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _gib(size: float) -> str:
    """Format bytes as GiB with two significant digits: 0, 0.0012, 3.4, 120."""
    if size < 1:
        return "0"
    digits = max(0, 1 - math.floor(math.log10(size / GIB)))
    return f"{size / GIB:.{min(digits, 6)}f}"

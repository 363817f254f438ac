"""Estimate the tokens and seconds of an iteration, and what learner processes exchange.

Seconds assume a share of a card's peak operations and bandwidth (flows/host/gpu_cards.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flows.host.gpu_cards import BANDWIDTH_SHARE, NETWORKS, PEAK_SHARE, Card
from flows.host.gpu_memory import (
    FULL,
    NUMBER,
    has_share,
    key_value,
    reserve,
    servers,
    slots,
)
from flows.host.model_shape import Shape
from params.schema.algorithms import Algorithm
from params.schema.recipe import Recipe

STEP_SECONDS = 0.005  # of a decoding step at least: launches, scheduling; an assumption
HALFWAY = 0.5  # of a branch's path is shared with its parent; an assumption


@dataclass(frozen=True)
class Tokens:
    """Tokens of one iteration, if every path has its maximal length."""

    paths: int  # all paths with their prompts, nothing shared
    most: int  # distinct tokens if paths share the prompt alone
    expected: int  # distinct tokens if branches share half of their parents


def tokens_of(recipe: Recipe, row: Algorithm) -> Tokens:
    """Count an iteration's tokens; each token of a tree is sampled and trained once (packing)."""
    rollout, response = recipe.reinforce.rollout, recipe.dialogue.path_tokens
    # a fresh prompt is of limited length; a growing dialogue has what the context leaves
    prompt = recipe.dialogue.prompt_tokens or recipe.prepare.policy.context - response
    questions, leaves = recipe.reinforce.questions, rollout.leaves
    branched = 0 if row.branching == "none" else leaves - rollout.initial
    return Tokens(
        paths=questions * leaves * (prompt + response),
        most=questions * (prompt + leaves * response),
        expected=round(questions * (prompt + (leaves - HALFWAY * branched) * response)),
    )


@dataclass(frozen=True)
class Seconds:
    """Seconds of one iteration, without tools and saving."""

    update: float  # computing
    sampling: float
    abreast: int  # paths of full length whose keys and values fit at once
    communication: float = 0.0  # of learner processes, if it does not overlap with computing
    loading: float = 0.0  # of new weights by all servers

    @property
    def total(self) -> float:
        return self.update + self.sampling + self.communication + self.loading


def seconds_of(
    recipe: Recipe,
    row: Algorithm,
    shape: Shape,
    card: Card,
    network: float = NETWORKS["400"],
) -> Seconds:
    """Estimate seconds at PEAK_SHARE of the operations and BANDWIDTH_SHARE of the bandwidth.

    Processes share the update and servers share the questions evenly; ``network``: bytes per second
    of each process, and of the folder from which servers load.
    """
    tokens = tokens_of(recipe, row).expected
    once = _operations(shape, tokens, recipe.prepare.policy.context)
    rate = PEAK_SHARE * card.operations[recipe.machine.precision]
    abreast = rows_abreast(recipe, shape, card)
    decoding = _decoding(recipe, shape, abreast, BANDWIDTH_SHARE * card.bandwidth)
    return Seconds(
        update=forward_equivalents(recipe, row) * once / rate / recipe.machine.processes,
        sampling=max(once / rate, decoding) / max(1, servers(recipe)),
        abreast=abreast,
        communication=communicated(recipe, row, shape) / network,
        loading=servers(recipe) * FULL * shape.weights / network,
    )


def communicated(recipe: Recipe, row: Algorithm, shape: Shape) -> float:
    """Return the bytes that each learner process receives in an update; it sends as many.

    A process lacks (n - 1) / n of all weights. For each of its micro-batches it receives those of
    the layers for the forward and the backward pass, embedding and LM head once for both, and its
    share of the gradients of what learns, of the n - 1 others; for a pass without a gradient all
    weights once.
    """
    count, update = recipe.machine.processes, recipe.reinforce.update
    if count == 1:
        return 0.0
    layers = shape.weights - shape.root
    trained = FULL * (2 * layers + shape.root + shape.learning)
    batches = math.ceil(tokens_of(recipe, row).expected / slots(recipe) / count)
    looked = _passes_without_gradient(recipe, row)
    return (count - 1) / count * batches * (update.epochs * trained + looked * FULL * shape.weights)


def _passes_without_gradient(recipe: Recipe, row: Algorithm) -> int:
    """Return how often an update looks at its tokens before it learns (forward_equivalents)."""
    update = recipe.reinforce.update
    steps = update.epochs * update.mini_batches
    samplers = recipe.reinforce.samplers
    old = samplers if recipe.reinforce.ahead else int(steps > 1)
    return old + row.kl_in("loss") + (samplers + 1) * row.kl_in("reward")


def _operations(shape: Shape, tokens: int, context: int) -> float:
    """Return the operations of one forward pass, two a multiplication.

    A token is multiplied by every weight of the linear layers. It attends to half of its path on
    average, for which each layer multiplies twice the queries' width (packing, Cost).
    """
    return 2 * tokens * (shape.linear + 2 * shape.queries * shape.layers * context / 2)


def forward_equivalents(recipe: Recipe, row: Algorithm) -> float:
    """Return the operations of an update, in forward passes.

    The backward pass counts two (by inputs, by weights), with adapters one; recomputation adds one.
    With several steps a batch, or samples drawn ahead, the old log-probabilities take another pass
    for each policy that sampled, a reference one (in the reward with one for each of these), and a
    critic with its own backbone one for its values and those of its update.
    """
    update = recipe.reinforce.update
    trained = (2 if recipe.lora else 3) + update.recompute
    looked = _passes_without_gradient(recipe, row)
    own_backbone = row.critic is not None and row.critic.backbone == "own"
    return update.epochs * (trained + own_backbone * (3 + update.recompute)) + looked + own_backbone


def rows_abreast(recipe: Recipe, shape: Shape, card: Card) -> int:
    """Return how many paths of full length are decoded at once; vLLM queues the others."""
    rows = recipe.reinforce.rollout.rows
    if not has_share(recipe):
        return rows
    path = recipe.prepare.policy.context * key_value(recipe, shape)
    weights = NUMBER[recipe.machine.precision] * shape.weights
    room = recipe.engine.memory * card.memory - weights - reserve(recipe)
    return max(1, min(rows, int(room / path)))


def _decoding(recipe: Recipe, shape: Shape, abreast: int, bandwidth: float) -> float:
    """Return the seconds of decoding an iteration's paths, at ``bandwidth`` bytes per second.

    Each step reads all weights once, and keys and values of every path, half of full length on
    average. Questions are sampled in batches that fill rollout.rows, and a batch in waves.
    """
    rollout, context = recipe.reinforce.rollout, recipe.prepare.policy.context
    batches = math.ceil(recipe.reinforce.questions / (rollout.rows // rollout.leaves))
    paths = recipe.reinforce.questions * rollout.leaves / batches
    steps = batches * math.ceil(paths / abreast) * recipe.dialogue.response_tokens
    cached = min(abreast, paths) * key_value(recipe, shape) * context / 2
    read = NUMBER[recipe.machine.precision] * shape.linear + cached
    return steps * max(STEP_SECONDS, read / bandwidth)

"""Estimate the tokens and seconds of an iteration, and what learner processes exchange.

Seconds assume shares of a card's operations and bandwidth (flows/host/gpu_cards.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flows.host.gpu_cards import BANDWIDTH_SHARE, NETWORKS, Card, peak_share
from flows.host.gpu_memory import (
    FULL,
    NUMBER,
    has_share,
    keys_values,
    reserve,
    servers,
    slots,
    states,
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
    """Estimate seconds at shares of the operations (peak_share) and of the bandwidth.

    Processes share the update and servers share the questions evenly; ``network``: bytes per second
    of each process, and of the folder from which servers load.
    """
    sampled = operations(recipe, shape, tokens_of(recipe, row).expected)
    once = operations(recipe, shape, learned_tokens(recipe, row, shape))
    rate = share_of(recipe, shape) * card.operations[recipe.machine.precision]
    abreast = rows_abreast(recipe, shape, card)
    decoding = _decoding(recipe, shape, abreast, BANDWIDTH_SHARE * card.bandwidth)
    return Seconds(
        update=forward_equivalents(recipe, row) * once / rate / recipe.machine.processes,
        sampling=max(sampled / rate, decoding) / max(1, servers(recipe)),
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
    batches = math.ceil(learned_tokens(recipe, row, shape) / slots(recipe) / count)
    looked = _passes_without_gradient(recipe, row)
    return (count - 1) / count * batches * (update.epochs * trained + looked * FULL * shape.weights)


def _passes_without_gradient(recipe: Recipe, row: Algorithm) -> int:
    """Return how often an update looks at its tokens before it learns (forward_equivalents)."""
    update = recipe.reinforce.update
    steps = update.epochs * update.mini_batches
    samplers = recipe.reinforce.samplers
    old = samplers if recipe.reinforce.ahead else int(steps > 1)
    return old + row.kl_in("loss") + (samplers + 1) * row.kl_in("reward")


def learned_tokens(recipe: Recipe, row: Algorithm, shape: Shape) -> int:
    """Return the tokens that a pass of an update computes: of trees each once, or of all rows."""
    tokens = tokens_of(recipe, row)
    return tokens.expected if shape.on_trees else tokens.paths


def share_of(recipe: Recipe, shape: Shape) -> float:
    """Return the share of a card's operations that an update reaches, which is an estimate."""
    return peak_share(active(recipe, shape), recipe.prepare.policy.context)


def active(recipe: Recipe, shape: Shape) -> float:
    """Return the weights that a token is multiplied by: of experts, those that are in use."""
    layers = shape.passed(recipe.machine.precision).layers
    return sum(layer.products for layer in layers) + shape.head


def operations(recipe: Recipe, shape: Shape, tokens: int) -> float:
    """Return the operations of one forward pass, two a multiplication.

    In each layer a token attends to half of its path on average, and at most to a window.
    """
    layers = shape.passed(recipe.machine.precision).layers
    half = recipe.prepare.policy.context / 2
    attended = sum(layer.pairs * min(layer.window or half, half) for layer in layers)
    return 2 * tokens * (active(recipe, shape) + attended)


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
    path = keys_values(recipe, shape) + states(shape)
    weights = NUMBER[recipe.machine.precision] * shape.weights
    room = recipe.engine.memory * card.memory - weights - reserve(recipe)
    return max(1, min(rows, int(room / path))) if path else rows


def _decoding(recipe: Recipe, shape: Shape, abreast: int, bandwidth: float) -> float:
    """Return the seconds of decoding an iteration's paths, at ``bandwidth`` bytes per second.

    Each step reads the weights once (of experts at most those that the paths are sent to), and what
    is kept of every path, keys and values of half its full length on average. Questions are sampled
    in batches that fill rollout.rows, and a batch in waves.
    """
    rollout = recipe.reinforce.rollout
    batches = math.ceil(recipe.reinforce.questions / (rollout.rows // rollout.leaves))
    paths = recipe.reinforce.questions * rollout.leaves / batches
    steps = batches * math.ceil(paths / abreast) * recipe.dialogue.response_tokens
    together = min(abreast, paths)
    kept = together * (keys_values(recipe, shape) / 2 + states(shape))
    weights = min(shape.linear, together * active(recipe, shape))
    read = NUMBER[recipe.machine.precision] * weights + kept
    return steps * max(STEP_SECONDS, read / bandwidth)

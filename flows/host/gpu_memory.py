"""Estimate the GPU memory of a recipe, from the shape of its policy.

It is the sum of its parts; tests compare it with the peak of real updates.
"""

from __future__ import annotations

from dataclasses import dataclass

from flows.host.gpu_cards import Card
from flows.host.model_shape import Shape
from params.schema.algorithms import Algorithm
from params.schema.recipe import Recipe
from params.schema.reward_model import RewardModel
from tasks.engines import ENGINES, SamplingLoad

FULL, HALF = 4, 2  # bytes of a value in float32 and in bfloat16
NUMBER = {"float32": FULL, "bfloat16": HALF}  # bytes of a value in matrix products
NARROW = {"float32": 0, "bfloat16": HALF}  # bytes of the cast of a float32 value
MOMENTS = 2  # values that AdamW keeps of each weight that learns


@dataclass(frozen=True)
class Memory:
    """Bytes by part: what stays on the GPU, and what each phase adds."""

    stays: dict[str, float]
    update: dict[str, float]
    sampling: dict[str, float]
    reward_model: dict[str, float]  # its training within an iteration; {}: there is none
    first_model: dict[str, float]  # all of its first training, a stage of its own; {}: none
    together: bool  # the phases overlap with sampling (reinforce.ahead)

    def phases(self) -> dict[str, float]:
        """Return the bytes that each phase needs at once."""
        return {
            phase: sum(sum(of_part.values()) for of_part in parts)
            for phase, parts in self._parts().items()
        }

    def _parts(self) -> dict[str, list[dict[str, float]]]:
        """Return what each phase has on the GPU."""
        learning = {"update": self.update, "reward model": self.reward_model}
        by_phase = {phase: [self.stays, parts] for phase, parts in learning.items() if parts}
        if self.together:
            by_phase = {
                f"{name} and sampling": [*some, self.sampling] for name, some in by_phase.items()
            }
        else:
            by_phase["sampling"] = [self.stays, self.sampling]
        return by_phase | ({"first reward model": [self.first_model]} if self.first_model else {})

    @property
    def peak(self) -> float:
        return max(self.phases().values())

    def largest(self, count: int = 3) -> list[tuple[str, float]]:
        """Return the largest parts of the phase that needs most."""
        phase = max(self.phases().items(), key=lambda item: item[1])[0]
        parts = [part for some in self._parts()[phase] for part in some.items()]
        return sorted(parts, key=lambda part: -part[1])[:count]


def memory(recipe: Recipe, row: Algorithm, shape: Shape, card: Card) -> Memory:
    """Return what a recipe needs on a card. Phases take turns; vLLM sleeps during the update.

    Of several learner processes, each with a card, it is the first one's, where the stage samples.
    """
    return Memory(
        stays=_staying(recipe, row, shape),
        update=_of_update(recipe, shape),
        sampling=_of_sampling(recipe, shape, card),
        reward_model=_of_reward_model(recipe, shape),
        first_model=_of_first_model(recipe, shape),
        together=recipe.reinforce.ahead > 0,
    )


def _staying(recipe: Recipe, row: Algorithm, shape: Shape) -> dict[str, float]:
    """Return what stays on the GPU from the first update on, in float32.

    Weights; for those that learn, gradients (freed when the next step begins) and AdamW's two
    moments; a reference where the row has a KL term and the learner does not hold it, or the policy
    that sampled ahead in its place; and a critic with its own backbone, which has all of these too,
    but no LM head. Each of several processes has its share of all of them, and the stage a whole
    policy that samples.
    """
    ahead = recipe.reinforce.ahead > 0
    adapters = {"adapters": FULL * shape.adapters} if shape.adapters else {}
    parts: dict[str, float] = {
        "master weights": FULL * shape.weights,
        **adapters,
        "gradients": FULL * shape.learning,
        "Adam's moments": MOMENTS * FULL * shape.learning,
    }
    # without its adapter, the policy is the reference
    if ahead or (row.kl and (row.kl.refresh or not shape.adapters)):
        parts["reference"] = FULL * shape.weights
    if row.critic and row.critic.backbone == "own":
        parts["critic"] = (2 + MOMENTS) * FULL * shape.backbone
    # one that scores, or the one that learns in its place; every process of several has none of it
    learned = {"reward model": FULL * shape.backbone} if recipe.reward_model else {}
    count = recipe.machine.processes
    if count == 1:
        return parts | learned
    sampling_policy = {} if servers(recipe) else {"policy that samples": FULL * shape.weights}
    return {part: size / count for part, size in parts.items()} | sampling_policy | learned


def _of_reward_model(recipe: Recipe, shape: Shape) -> dict[str, float]:
    """Return what a training of the reward model adds within an iteration of the stage.

    With ``ahead``, the one before it scores a batch meanwhile.
    """
    reward_model = recipe.reward_model
    if reward_model is None or reward_model.again is None:
        return {}
    scoring = {"reward model that scores": FULL * shape.backbone} if recipe.reinforce.ahead else {}
    return scoring | _training_of_model(recipe, reward_model, shape)


def _of_first_model(recipe: Recipe, shape: Shape) -> dict[str, float]:
    """Return what the first training of the reward model needs, beside the policy that sampled."""
    reward_model = recipe.reward_model
    if reward_model is None:
        return {}
    return {
        "policy that sampled": FULL * shape.weights,
        "reward model": FULL * shape.backbone,
        **_training_of_model(recipe, reward_model, shape),
    }


def _training_of_model(recipe: Recipe, reward_model: RewardModel, shape: Shape) -> dict[str, float]:
    """Return what a training adds to the weights of a reward model, all of which learn."""
    precision = recipe.machine.precision
    tokens = max(reward_model.micro_batch_tokens, recipe.prepare.policy.context)
    return {
        "reward model's gradients and moments": (1 + MOMENTS) * FULL * shape.backbone,
        **({"reward model's cast": HALF * shape.linear} if NARROW[precision] else {}),
        "reward model's activations": activations(shape, tokens, precision, recompute=False)
        + tokens * _backward(shape, precision),
    }


def servers(recipe: Recipe) -> int:
    """Return how many servers sample for a recipe; 0: an engine of this machine does."""
    return len(recipe.engine.addresses)


def _of_update(recipe: Recipe, shape: Shape) -> dict[str, float]:
    """Return what the forward and backward pass of one micro-batch adds.

    Cast: autocast makes a bfloat16 copy of each matrix once a pass. Logits: at most LOGITS_AT_ONCE
    exist, and the backward pass holds their log-softmax, its gradient and their gradient at once,
    in float32. The gradient of the largest matrix, the LM head, is computed in parts in the
    precision of the pass: the sum so far, and the part to add. Casts and activations are whole in
    each of several processes.
    """
    from tasks.learning.passes import LOGITS_AT_ONCE

    precision = recipe.machine.precision
    tokens = slots(recipe)
    logits = min(LOGITS_AT_ONCE[recipe.machine.device], tokens * shape.vocabulary)
    head = 0 if shape.adapters else shape.largest
    return {
        **({"bfloat16 cast": HALF * shape.linear} if NARROW[precision] else {}),
        "activations": activations(shape, tokens, precision, recipe.reinforce.update.recompute),
        "gradients of activations": tokens * _backward(shape, precision),
        "logits": 3 * FULL * logits,
        "gradient being made": 2 * NUMBER[precision] * head,
        **_gathered(recipe, shape),
    }


def _gathered(recipe: Recipe, shape: Shape) -> dict[str, float]:
    """Return what several processes gather in float32 (tasks/policy/sharding.py).

    Embedding and LM head stay for the whole pass; of the layers there is the one that computes and
    the next one. Where weights learn, their gradients are whole until they have been dealt.
    """
    if recipe.machine.processes == 1:
        return {}
    gradients = 0 if shape.adapters else shape.root + shape.layer
    return {
        "gathered weights": FULL * (shape.root + 2 * shape.layer),
        **({"whole gradients": FULL * gradients} if gradients else {}),
    }


def slots(recipe: Recipe) -> int:
    """Return the most tokens of a micro-batch: a longer path is a micro-batch by itself."""
    return max(recipe.reinforce.update.micro_batch_tokens, recipe.prepare.policy.context)


def activations(shape: Shape, tokens: int, precision: str, recompute: bool) -> float:
    """Return the bytes that a forward pass over ``tokens`` keeps for the backward pass.

    With recomputation, only each layer's input stays (the residual stream, float32), and the
    activations of the one layer being recomputed. The last norm keeps its input, its normed input
    and its output.
    """
    layer = _layer(shape, precision)
    layers = shape.layers * FULL * shape.hidden + layer if recompute else shape.layers * layer
    last = (3 * FULL + NARROW[precision]) * shape.hidden
    return tokens * (layers + last)


def _layer(shape: Shape, precision: str) -> float:
    """Return the bytes a token that autograd keeps of one layer.

    Each of the two norms keeps its input and its normed input in float32. In float32 its output is
    kept once for all matrix products that read it; under autocast each of these (query, key, value;
    gate, up) keeps its own bfloat16 copy. Attention keeps query, key, value and output, the last
    once more in the order in which the next product reads it; the feed-forward layer keeps the gate
    before and after its nonlinearity, up, and their product. Qwen3's norms of query and key work in
    float32, and keep input and normed input.
    """
    number = NUMBER[precision]
    norms = 4 * FULL * shape.hidden
    inputs = (5 if number == HALF else 2) * number * shape.hidden
    attention = number * (3 * shape.queries + 2 * shape.keys)
    feed_forward = number * 4 * shape.feed_forward
    of_heads = (FULL + number) * (shape.queries + shape.keys) if shape.heads_are_normed else 0
    return norms + inputs + attention + feed_forward + of_heads


def _backward(shape: Shape, precision: str) -> float:
    """Return the bytes a token in the backward pass of a feed-forward layer, where it peaks.

    The gradients of gate, up and their product, and of the residual stream before and after.
    """
    return 3 * NUMBER[precision] * shape.feed_forward + 2 * FULL * shape.hidden


def _of_sampling(recipe: Recipe, shape: Shape, card: Card) -> dict[str, float]:
    """Return what sampling adds to the learner; an engine on another machine adds nothing."""
    ahead = recipe.reinforce.ahead > 0  # with the weights before the update
    sampling_weights: dict[str, float] = (
        {"weights that sample": FULL * shape.weights} if ahead else {}
    )
    if servers(recipe):
        return sampling_weights
    return sampling_weights | ENGINES[recipe.engine.kind].memory(sampling_load(recipe, shape, card))


def sampling_load(recipe: Recipe, shape: Shape, card: Card) -> SamplingLoad:
    """Return what the recipe's engine has to hold."""
    number = NUMBER[recipe.machine.precision]
    return SamplingLoad(
        weights=number * shape.weights,
        cast=NARROW[recipe.machine.precision] * shape.linear,
        key_value=key_value(recipe, shape),
        vocabulary=shape.vocabulary,
        context=recipe.prepare.policy.context,
        rows=recipe.reinforce.rollout.rows,
        memory=recipe.engine.memory,
        gpu=card.memory if recipe.machine.device == "cuda" else None,
    )


def key_value(recipe: Recipe, shape: Shape) -> int:
    """Return the bytes of the keys and values of one token."""
    return 2 * NUMBER[recipe.machine.precision] * shape.keys * shape.layers


def least_share(recipe: Recipe, shape: Shape) -> float:
    """Return the bytes that vLLM needs to start: weights, one path and its own reserve."""
    weights = NUMBER[recipe.machine.precision] * shape.weights
    return weights + recipe.prepare.policy.context * key_value(recipe, shape) + reserve(recipe)


def has_share(recipe: Recipe) -> bool:
    """Return whether the engine takes a fixed share of this machine's GPU (engine.memory)."""
    engine = recipe.engine
    takes_share = ENGINES[engine.kind].reserve is not None
    return takes_share and not servers(recipe) and recipe.machine.device == "cuda"


def reserve(recipe: Recipe) -> float:
    """Return the bytes that the engine takes beside weights, keys and values."""
    return ENGINES[recipe.engine.kind].reserve or 0.0


def fits(recipe: Recipe, row: Algorithm, shape: Shape, card: Card) -> bool:
    """Return whether the recipe runs on the card."""
    starts = recipe.engine.memory * card.memory >= least_share(recipe, shape)
    return memory(recipe, row, shape, card).peak <= card.usable and (
        starts or not has_share(recipe)
    )

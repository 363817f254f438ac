"""Estimate the GPU memory of a recipe, from the shape of its policy.

It is the sum of its parts. What a pass holds is measured on the policy itself, without values
(flows/host/dry_pass.py); tests compare the sum with the peak of real updates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flows.host.gpu_cards import Card
from flows.host.model_shape import Shape
from params.schema.algorithms import Algorithm
from params.schema.recipe import Recipe
from params.schema.reward_model import RewardModel
from tasks.engines import ENGINES, SamplingLoad

if TYPE_CHECKING:
    from flows.host.dry_pass import CachedLayer

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
        update=_of_update(recipe, shape, row.entropy_bonus > 0),
        sampling=_of_sampling(recipe, shape, card),
        reward_model=_of_reward_model(recipe, shape),
        first_model=_of_first_model(recipe, shape),
        together=recipe.reinforce.ahead > 0,
    )


def _staying(recipe: Recipe, row: Algorithm, shape: Shape) -> dict[str, float]:
    """Return what stays on the GPU from the first update on, in float32.

    Weights; for those that learn, gradients (freed when the next step begins) and AdamW's two
    moments; a reference where the row has a KL term and the learner does not hold it, or the policy
    that sampled ahead in its place; a teacher; and a critic with its own backbone, which has all of
    these too, but no LM head. Each of several processes has its share of all of them, and the stage
    a whole policy that samples.
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
    if row.teacher:
        parts["teacher"] = FULL * shape.teacher
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
    context = recipe.prepare.policy.context
    tokens, whole = max(reward_model.micro_batch_tokens, context), replace(shape, lora=None)
    return {
        "reward model's gradients and moments": (1 + MOMENTS) * FULL * shape.backbone,
        **({"reward model's cast": casts(whole, precision, False)} if NARROW[precision] else {}),
        "reward model's activations": activations(whole, tokens, precision, False, context)
        + sum(_backward(whole, tokens, precision, False, context).values()),
    }


def servers(recipe: Recipe) -> int:
    """Return how many servers sample for a recipe; 0: an engine of this machine does."""
    return len(recipe.engine.addresses)


def _of_update(recipe: Recipe, shape: Shape, entropy: bool) -> dict[str, float]:
    """Return what the forward and backward pass of one micro-batch adds.

    The backward pass begins with the logits, of which at most LOGITS_AT_ONCE exist: in float32 and
    in bfloat16. Where the loss has the ``entropy``, their log-softmax, its gradient and their
    gradient exist at once instead, and passes in float32 take about as much. The gradient of the LM
    head is computed in parts in the precision of the pass: the sum so far, and the part to add.
    Then it goes through the layers. The larger of the two counts. Casts and activations are whole
    in each of several processes.
    """
    tokens, update = slots(recipe), recipe.reinforce.update
    precision, context = recipe.machine.precision, recipe.prepare.policy.context
    of_logits = _of_logits(recipe, shape, tokens, entropy)
    of_layers = _backward(shape, tokens, precision, update.recompute, context)
    cast = casts(shape, precision, update.recompute)
    return {
        **({"bfloat16 cast": cast} if cast else {}),
        "activations": activations(shape, tokens, precision, update.recompute, context),
        **(of_logits if sum(of_logits.values()) > sum(of_layers.values()) else of_layers),
        **_gathered(recipe, shape),
    }


def _of_logits(recipe: Recipe, shape: Shape, tokens: int, entropy: bool) -> dict[str, float]:
    """Return what the logits and the gradient of the LM head add."""
    from tasks.learning.passes import LOGITS_AT_ONCE

    logits = min(LOGITS_AT_ONCE[recipe.machine.device], tokens * shape.vocabulary)
    head = 0 if shape.adapters else shape.head
    number = NUMBER[recipe.machine.precision]
    each = 3 * FULL if entropy or number == FULL else FULL + number
    return {
        "logits": each * logits,
        "gradient being made": 2 * number * head,
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


def casts(shape: Shape, precision: str, recompute: bool) -> float:
    """Return the bytes of the bfloat16 copy of each matrix that autograd keeps.

    Autocast makes one for each product; with recomputation those of one layer exist at a time.
    """
    if not NARROW[precision]:
        return 0.0
    sizes = [layer.saved.constant for layer in shape.passed(precision).layers]
    return (max(sizes) if recompute else sum(sizes)) + HALF * shape.head


def activations(
    shape: Shape, tokens: int, precision: str, recompute: bool, context: int = 0
) -> float:
    """Return the bytes that a forward pass over ``tokens`` keeps for the backward pass.

    ``context``: tokens of a context, which rows may grow with. With recomputation, only each
    layer's input stays, and what the one layer keeps that is being recomputed.
    """
    outside, kept, computed = _bytes_of_layers(shape, tokens, precision, recompute, context)
    return outside + sum(kept) + (max(computed) if recompute else 0)


def _bytes_of_layers(
    shape: Shape, tokens: int, precision: str, recompute: bool, context: int
) -> tuple[float, list[float], list[float]]:
    """Return what is kept outside of layers, what each keeps, and what it has when computed."""
    passed = shape.passed(precision)
    constant = not NARROW[precision]  # else it is a cast, another part
    computed = [
        layer.saved.at(tokens, context) - (0 if constant else layer.saved.constant)
        for layer in passed.layers
    ]
    inputs = [tokens * layer.output for layer in passed.layers]
    return passed.outside.at(tokens, context), inputs if recompute else computed, computed


def _backward(
    shape: Shape, tokens: int, precision: str, recompute: bool, context: int
) -> dict[str, float]:
    """Return what the backward pass through the layers adds to what the forward pass has kept.

    It goes from the last layer to the first, and frees what layers have kept.
    """
    passed = shape.passed(precision)
    outside, kept, computed = _bytes_of_layers(shape, tokens, precision, recompute, context)
    peak = before = outside
    for layer, own, whole in zip(passed.layers, kept, computed, strict=True):
        before += own
        again = whole if recompute else 0.0
        peak = max(peak, before + again + max(0.0, layer.backward.at(tokens, context)))
    added = peak - activations(shape, tokens, precision, recompute, context)
    return {
        "gradients of activations": max(0.0, added),
        "gradient being made": max(layer.gradients for layer in passed.layers),
    }


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
        keys_values=keys_values(recipe, shape),
        states=states(shape),
        vocabulary=shape.vocabulary,
        context=recipe.prepare.policy.context,
        rows=recipe.reinforce.rollout.rows,
        memory=recipe.engine.memory,
        gpu=card.memory if recipe.machine.device == "cuda" else None,
    )


def keys_values(recipe: Recipe, shape: Shape) -> float:
    """Return the bytes of keys and values of a path of full length.

    vLLM keeps those of a window alone, and of latent attention what they are made from;
    transformers keeps all of them as they are.
    """
    context, of_vllm = recipe.prepare.policy.context, _has_own_cache(recipe)

    def numbers(layer: CachedLayer) -> float:
        each = shape.latent if of_vllm and shape.latent and layer.each else layer.each
        return each * (min(layer.window or context, context) if of_vllm else context)

    return NUMBER[recipe.machine.precision] * sum(map(numbers, shape.cached))


def states(shape: Shape) -> float:
    """Return the bytes of the states of a path, however long it is, in float32."""
    return FULL * sum(layer.state for layer in shape.cached)


def _has_own_cache(recipe: Recipe) -> bool:
    """Return whether the engine's cache is its own, and not that of transformers."""
    return ENGINES[recipe.engine.kind].reserve is not None


def least_share(recipe: Recipe, shape: Shape) -> float:
    """Return the bytes that vLLM needs to start: weights, one path and its own reserve."""
    weights = NUMBER[recipe.machine.precision] * shape.weights
    return weights + keys_values(recipe, shape) + states(shape) + reserve(recipe)


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

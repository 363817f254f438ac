"""Estimate GPU memory and seconds of a recipe from the shape of its policy, without a download.

Memory is the sum of its parts; tests compare it with the peak of real updates. Seconds assume a
share of a card's peak operations and bandwidth (PEAK_SHARE, BANDWIDTH_SHARE).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from params.schema import architectures
from params.schema import base as schema
from params.schema.algorithms import Algorithm
from params.schema.prepare import TinyPolicy
from params.schema.recipe import Recipe
from params.schema.reinforce import Lora
from params.schema.reward_model import RewardModel
from tasks.engines import ENGINES, SamplingLoad

GIB, MIB = 2**30, 2**20
FULL, HALF = 4, 2  # bytes of a value in float32 and in bfloat16
NUMBER = {"float32": FULL, "bfloat16": HALF}  # bytes of a value in matrix products
NARROW = {"float32": 0, "bfloat16": HALF}  # bytes of the cast of a float32 value
MOMENTS = 2  # values that AdamW keeps of each weight that learns
MEMORY_SHARE = 0.95  # of a card; the rest is for CUDA's context, kernels and fragmentation
# Of the card's operations per second. Published updates of models of 1.7B to 4B reach 9 % (one GPU,
# TRL's issue 6092) to 22 % (one H100, adapters; prime-rl's benchmarks) at 16k tokens or below.
PEAK_SHARE = 0.2
BANDWIDTH_SHARE = 0.6  # of the card's bandwidth in decoding; an assumption
STEP_SECONDS = 0.005  # of a decoding step at least: launches, scheduling; an assumption
HALFWAY = 0.5  # of a branch's path is shared with its parent; an assumption
COUNTED = ("llama", "qwen2", "qwen3")  # architectures whose layers _layer describes


@dataclass(frozen=True)
class Card:
    """A GPU: bytes, dense operations per second and bytes per second, as in its data sheet."""

    name: str
    memory: float
    operations: dict[str, float]  # by machine.precision
    bandwidth: float

    @property
    def usable(self) -> float:
        return MEMORY_SHARE * self.memory


# Memory as nvidia-smi gives it. The rest from NVIDIA's data sheets (RTX 4090: the Ada whitepaper;
# H100 SXM; H200 SXM), without sparsity.
ADA = {"bfloat16": 165.2e12, "float32": 82.6e12}
HOPPER = {"bfloat16": 989e12, "float32": 67e12}
CARDS = {  # by nominal GB
    "24": Card("24 GB (RTX 4090)", 24564 * MIB, ADA, 1.008e12),
    "80": Card("80 GB (H100)", 81559 * MIB, HOPPER, 3.35e12),
    "141": Card("141 GB (H200)", 143771 * MIB, HOPPER, 4.8e12),
}

# Bytes per second that a process sends and receives at once. NVLink: 900 GB/s both ways of an H100
# (NVIDIA's data sheet); the others at their nominal rate, a port for each card.
NETWORKS = {"nvlink": 450e9, "400": 50e9, "100": 12.5e9, "10": 1.25e9}  # else Gb/s


def card_here() -> Card | None:
    """Return this machine's first GPU, with the speed of the next smaller card, or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    here = torch.cuda.get_device_properties(0)
    alike = [card for card in CARDS.values() if card.memory <= 1.02 * here.total_memory]
    speed = alike[-1] if alike else CARDS["24"]
    return Card(f"here ({here.name})", here.total_memory, speed.operations, speed.bandwidth)


# ---------------------------------------------------------------- shape of the model


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that memory and seconds depend on, in numbers of values."""

    weights: int
    backbone: int  # without an untied LM head
    linear: int  # weights used in matrix products, including a tied LM head
    largest: int  # weights of the largest matrix
    adapters: int  # weights of the recipe's adapters; 0 without
    layers: int
    hidden: int
    queries: int  # heads x size
    keys: int  # key-value heads x size
    feed_forward: int
    vocabulary: int
    heads_are_normed: bool  # Qwen3

    @property
    def learning(self) -> int:
        return self.adapters or self.weights

    @property
    def root(self) -> int:
        """Weights outside the layers: the embedding, and an LM head of its own."""
        return self.vocabulary * self.hidden + self.weights - self.backbone

    @property
    def layer(self) -> float:
        return (self.weights - self.root) / self.layers


def shape_of(config: Any, lora: Lora | None = None) -> Shape:
    """Return the shape of a causal language model from its transformers config.

    Raises ValueError for an architecture whose layers are not known here, and for adapters on
    modules that the model does not have.
    """
    if config.model_type not in COUNTED:
        raise ValueError(
            f"prepare.policy is a {config.model_type}, whose layers are not known here: its memory "
            f"is counted for {', '.join(COUNTED)} (flows/host/gpu_memory.py, COUNTED)"
        )
    shape, linear = _measured(config.to_json_string())
    return replace(shape, adapters=_adapters(linear, lora)) if lora else shape


@cache  # to make a model takes half a second, and its shape is asked for each card and each remedy
def _measured(config_text: str) -> tuple[Shape, dict[str, tuple[int, int]]]:
    """Return a model's shape without adapters, and the inputs and outputs of its linear layers."""
    import torch

    from tasks.policy.lean_transformers import transformers

    settings = json.loads(config_text)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    sizes = [weight.numel() for weight in model.parameters()]
    heads, hidden = config.num_attention_heads, config.hidden_size
    size = getattr(config, "head_dim", None) or hidden // heads
    shape = Shape(
        weights=sum(sizes),
        backbone=sum(weight.numel() for weight in model.base_model.parameters()),
        linear=sum(module.weight.numel() for module in linear.values()),
        largest=max(sizes),
        adapters=0,
        layers=config.num_hidden_layers,
        hidden=hidden,
        queries=heads * size,
        keys=config.num_key_value_heads * size,
        feed_forward=config.intermediate_size,
        vocabulary=config.vocab_size,
        heads_are_normed=any(name.endswith("q_norm") for name, _ in model.named_modules()),
    )
    return shape, {name: (m.in_features, m.out_features) for name, m in linear.items()}


def _adapters(linear: Mapping[str, tuple[int, int]], lora: Lora) -> int:
    """Count the weights of adapters: two matrices a layer, inputs x rank and rank x outputs."""
    sizes_by_module = {
        module: [sizes for name, sizes in linear.items() if name.rpartition(".")[2] == module]
        for module in lora.modules
    }
    if absent := [module for module, sizes in sizes_by_module.items() if not sizes]:
        known = sorted({name.rpartition(".")[2] for name in linear})
        raise ValueError(
            f"lora.modules names {absent[0]}, which is no linear layer of the policy: choose of "
            f"{known}"
        )
    return sum(lora.rank * sum(sizes) for every in sizes_by_module.values() for sizes in every)


def config_of(recipe: Recipe, folder: Path = schema.PARAMS) -> Any:
    """Return the transformers config of a recipe's policy, without a download.

    A tiny policy's is in the recipe, a known one's in architectures.yaml, any other one's in its
    folder or in the hub's cache. Raises ValueError where none of these has it.
    """
    from tasks.policy.lean_transformers import transformers
    from tasks.policy.tiny import tiny_config

    policy = recipe.prepare.policy
    if isinstance(policy, TinyPolicy):
        return tiny_config(policy, policy.vocabulary)
    known = architectures.load_architectures(folder).get(policy.name)
    if known and policy.revision in (known.revision, None):
        settings = dict(known.config)
        return transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    try:
        return transformers.AutoConfig.from_pretrained(
            policy.name,
            revision=policy.revision,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError):
        raise ValueError(
            f"prepare.policy.name {policy.name} at revision {policy.revision} is no row of "
            f"{folder / 'architectures.yaml'}, no folder and not in the hub's cache: add a row "
            "with its config.json, or fetch it once: `hf download "
            f"{policy.name} config.json --revision {policy.revision or 'main'}`"
        ) from None


# ---------------------------------------------------------------- memory


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
    return weights + recipe.prepare.policy.context * key_value(recipe, shape) + _reserve(recipe)


def has_share(recipe: Recipe) -> bool:
    """Return whether the engine takes a fixed share of this machine's GPU (engine.memory)."""
    engine = recipe.engine
    takes_share = ENGINES[engine.kind].reserve is not None
    return takes_share and not servers(recipe) and recipe.machine.device == "cuda"


def _reserve(recipe: Recipe) -> float:
    return ENGINES[recipe.engine.kind].reserve or 0.0


def fits(recipe: Recipe, row: Algorithm, shape: Shape, card: Card) -> bool:
    """Return whether the recipe runs on the card."""
    starts = recipe.engine.memory * card.memory >= least_share(recipe, shape)
    return memory(recipe, row, shape, card).peak <= card.usable and (
        starts or not has_share(recipe)
    )


# ---------------------------------------------------------------- tokens and seconds


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
    room = recipe.engine.memory * card.memory - weights - _reserve(recipe)
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

"""Estimate GPU memory and seconds of a recipe from the shape of its policy, without a download.

Memory is counted part by part; tests hold the sum against the peak of real updates. Seconds assume
a share of a card's peak operations and bandwidth (PEAK_SHARE, BANDWIDTH_SHARE).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from params.schema import architectures
from params.schema import base as schema
from params.schema.algorithms import Algorithm
from params.schema.prepare import TinyPolicy
from params.schema.recipe import Recipe
from params.schema.reinforce import Lora
from tasks.engines import ENGINES, SamplingLoad
from tasks.learning.learner import LOGITS_AT_ONCE
from tasks.policy.tiny import tiny_config

GIB, MIB = 2**30, 2**20
FULL, HALF = 4, 2  # bytes of a number in float32 and in bfloat16
NUMBER = {"float32": FULL, "bfloat16": HALF}  # of what a pass multiplies
NARROW = {"float32": 0, "bfloat16": HALF}  # of its copy of a float32 number
MOMENTS = 2  # numbers that AdamW keeps of each weight that learns
MEMORY_SHARE = 0.95  # of a card; the rest: CUDA's context, kernels, gaps between tensors
PEAK_SHARE = 0.4  # of the card's operations that passes reach: an assumption
BANDWIDTH_SHARE = 0.6  # of the card's bandwidth that decoding reaches: an assumption
STEP_SECONDS = 0.005  # of a decoding step at least: launches, scheduling; an assumption
HALFWAY = 0.5  # of a branch's path is its parent's: an assumption
COUNTED = ("llama", "qwen2", "qwen3")  # architectures whose layers keep what _layer says


@dataclass(frozen=True)
class Card:
    """A GPU: bytes, operations a second (dense) and bytes a second, as its maker states them."""

    name: str
    memory: float
    operations: dict[str, float]  # of each machine.precision
    bandwidth: float

    @property
    def usable(self) -> float:
        return MEMORY_SHARE * self.memory


# Memory as nvidia-smi gives it. The rest from NVIDIA's data sheets (RTX 4090: the Ada whitepaper;
# H100 SXM; H200 SXM), without sparsity.
ADA = {"bfloat16": 165.2e12, "float32": 82.6e12}
HOPPER = {"bfloat16": 989e12, "float32": 67e12}
CARDS = {  # by the GB that they are sold with
    "24": Card("24 GB (RTX 4090)", 24564 * MIB, ADA, 1.008e12),
    "80": Card("80 GB (H100)", 81559 * MIB, HOPPER, 3.35e12),
    "141": Card("141 GB (H200)", 143771 * MIB, HOPPER, 4.8e12),
}


def card_here() -> Card | None:
    """The first GPU of this machine with its real memory, at the speed of the next smaller card."""
    if not torch.cuda.is_available():
        return None
    here = torch.cuda.get_device_properties(0)
    alike = [card for card in CARDS.values() if card.memory <= 1.02 * here.total_memory]
    speed = alike[-1] if alike else CARDS["24"]
    return Card(f"here ({here.name})", here.total_memory, speed.operations, speed.bandwidth)


# ---------------------------------------------------------------- the model, without its weights


@dataclass(frozen=True)
class Shape:
    """What counts of a model: its weights, and the widths of its layers."""

    weights: int
    backbone: int  # those without a head of its own
    linear: int  # weights that a token is multiplied by; a head that is the embedding is one
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


def shape_of(config: Any, lora: Lora | None = None) -> Shape:
    """The shape of a causal language model of a transformers config.

    Raises ValueError for an architecture that is counted otherwise, and for adapters on modules
    that the model has not.
    """
    if config.model_type not in COUNTED:
        raise ValueError(
            f"prepare.policy is a {config.model_type}, whose layers are not known here: its memory "
            f"is counted for {', '.join(COUNTED)} (flows/host/gpu_memory.py, COUNTED)"
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    sizes = [weight.numel() for weight in model.parameters()]
    heads, hidden = config.num_attention_heads, config.hidden_size
    size = getattr(config, "head_dim", None) or hidden // heads
    return Shape(
        weights=sum(sizes),
        backbone=sum(weight.numel() for weight in model.base_model.parameters()),
        linear=sum(module.weight.numel() for module in linear.values()),
        largest=max(sizes),
        adapters=_adapters(linear, lora) if lora else 0,
        layers=config.num_hidden_layers,
        hidden=hidden,
        queries=heads * size,
        keys=config.num_key_value_heads * size,
        feed_forward=config.intermediate_size,
        vocabulary=config.vocab_size,
        heads_are_normed=any(name.endswith("q_norm") for name, _ in model.named_modules()),
    )


def _adapters(linear: dict[str, torch.nn.Linear], lora: Lora) -> int:
    """Each adapted layer gets two matrices: inputs to rank, and rank to outputs."""
    chosen = {
        wanted: [m for name, m in linear.items() if name.rpartition(".")[2] == wanted]
        for wanted in lora.modules
    }
    if absent := [wanted for wanted, modules in chosen.items() if not modules]:
        known = sorted({name.rpartition(".")[2] for name in linear})
        raise ValueError(
            f"lora.modules names {absent[0]}, which is no linear layer of the policy: choose of "
            f"{known}"
        )
    every = [module for modules in chosen.values() for module in modules]
    return sum(lora.rank * (module.in_features + module.out_features) for module in every)


def config_of(recipe: Recipe, folder: Path = schema.PARAMS) -> Any:
    """The transformers config of a recipe's policy, without a download.

    A tiny policy has it in the recipe, a known one in architectures.yaml, another one in its folder
    or in the hub's cache. Raises ValueError where none of these has it.
    """
    policy = recipe.prepare.policy
    if isinstance(policy, TinyPolicy):
        return tiny_config(policy, policy.vocabulary)
    known = architectures.load_architectures(folder).get(policy.name)
    if known and policy.revision in (known.revision, None):
        settings = dict(known.config)
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    try:
        return AutoConfig.from_pretrained(
            policy.name, revision=policy.revision, local_files_only=True
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
    """Bytes by part: what stays on the GPU, and what each phase needs beside it."""

    stays: dict[str, float]
    update: dict[str, float]
    sampling: dict[str, float]
    together: bool  # the phases overlap (reinforce.ahead)

    def phases(self) -> dict[str, float]:
        """Bytes that are needed at once, by phase."""
        base, update, sampling = (
            sum(parts.values()) for parts in (self.stays, self.update, self.sampling)
        )
        if self.together:
            return {"update and sampling": base + update + sampling}
        return {"update": base + update, "sampling": base + sampling}

    @property
    def peak(self) -> float:
        return max(self.phases().values())

    def largest(self, count: int = 3) -> list[tuple[str, float]]:
        """The largest parts of the phase that needs most."""
        phase = max(self.phases().items(), key=lambda item: item[1])[0]
        parts = dict(self.stays)
        for name in ("update", "sampling"):
            if name in phase:
                parts |= getattr(self, name)
        return sorted(parts.items(), key=lambda part: -part[1])[:count]


def memory(recipe: Recipe, row: Algorithm, shape: Shape, card: Card) -> Memory:
    """What a recipe needs on a card. The phases take turns; vLLM sleeps during the update."""
    return Memory(
        stays=_staying(row, shape),
        update=_of_update(recipe, shape),
        sampling=_of_sampling(recipe, shape, card),
        together=recipe.reinforce.ahead > 0,
    )


def _staying(row: Algorithm, shape: Shape) -> dict[str, float]:
    """What lies on the GPU from the first update on, in float32.

    Weights, for each one that learns its gradient (dropped when the next step begins) and AdamW's
    two moments; a reference where the row has a KL term and the learner does not hold it; and a
    critic with a backbone of its own, which has all of these too, and no head over the vocabulary.
    """
    adapters = {"adapters": FULL * shape.adapters} if shape.adapters else {}
    parts: dict[str, float] = {
        "master weights": FULL * shape.weights,
        **adapters,
        "gradients": FULL * shape.learning,
        "Adam's moments": MOMENTS * FULL * shape.learning,
    }
    if row.kl and (row.kl.refresh or not shape.adapters):  # an adapter's base is its reference
        parts["reference"] = FULL * shape.weights
    if row.critic and row.critic.backbone == "own":
        parts["critic"] = (2 + MOMENTS) * FULL * shape.backbone
    return parts


def _of_update(recipe: Recipe, shape: Shape) -> dict[str, float]:
    """What the forward and backward pass of one micro-batch takes.

    The cast: autocast makes a bfloat16 copy of each matrix once a pass. Logits: at most
    LOGITS_AT_ONCE exist, and the backward pass holds their log-softmax, its gradient and theirs at
    once, in float32. The gradient of the largest matrix, the head, is made part by part in the
    precision of the pass: what has been added up so far, and what is being added.
    """
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
    }


def slots(recipe: Recipe) -> int:
    """Tokens of a micro-batch, at most: a path that is longer than it stands alone."""
    return max(recipe.reinforce.update.micro_batch_tokens, recipe.prepare.policy.context)


def activations(shape: Shape, tokens: int, precision: str, recompute: bool) -> float:
    """Bytes that a forward pass over so many tokens keeps for the backward pass.

    Recomputed, only each layer's input stays (the stream of residuals, float32), and what one layer
    keeps while its turn lasts. The last norm keeps its input, its normed input and its output.
    """
    layer = _layer(shape, precision)
    layers = shape.layers * FULL * shape.hidden + layer if recompute else shape.layers * layer
    last = (3 * FULL + NARROW[precision]) * shape.hidden
    return tokens * (layers + last)


def _layer(shape: Shape, precision: str) -> float:
    """Bytes a token of what autograd keeps of one layer.

    Each of the two norms keeps its input and its normed input in float32. In float32 its output is
    kept once for the products that read it; under autocast each of these (query, key, value; gate,
    up) keeps a bfloat16 copy of its own. Attention keeps query, key, value and output, the last
    once more in the order in which the next product reads it; the feed-forward layer the gate
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
    """Bytes a token in the backward pass of a feed-forward layer, its widest place.

    The gradients of gate, up and their product, and of the stream of residuals before and after.
    """
    return 3 * NUMBER[precision] * shape.feed_forward + 2 * FULL * shape.hidden


def _of_sampling(recipe: Recipe, shape: Shape, card: Card) -> dict[str, float]:
    """What sampling takes beside the learner; an engine elsewhere takes nothing itself."""
    ahead = recipe.reinforce.ahead > 0  # with weights that the learner is leaving behind
    own: dict[str, float] = {"weights that sample": FULL * shape.weights} if ahead else {}
    if recipe.engine.server:
        return own
    return own | ENGINES[recipe.engine.kind].memory(sampling_load(recipe, shape, card))


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
    """Bytes of the keys and values of one token."""
    return 2 * NUMBER[recipe.machine.precision] * shape.keys * shape.layers


def least_share(recipe: Recipe, shape: Shape) -> float:
    """Return the bytes with which the engine can start: weights, one path and its reserve."""
    weights = NUMBER[recipe.machine.precision] * shape.weights
    return weights + recipe.prepare.policy.context * key_value(recipe, shape) + _reserve(recipe)


def has_share(recipe: Recipe) -> bool:
    """Whether the engine takes a fixed share of this machine's GPU (engine.memory)."""
    engine = recipe.engine
    takes_share = ENGINES[engine.kind].reserve is not None
    return takes_share and not engine.server and recipe.machine.device == "cuda"


def _reserve(recipe: Recipe) -> float:
    return ENGINES[recipe.engine.kind].reserve or 0.0


def fits(recipe: Recipe, row: Algorithm, shape: Shape, card: Card) -> bool:
    """Whether the recipe runs on the card."""
    begins = recipe.engine.memory * card.memory >= least_share(recipe, shape)
    return memory(recipe, row, shape, card).peak <= card.usable and (
        begins or not has_share(recipe)
    )


# ---------------------------------------------------------------- tokens and seconds


@dataclass(frozen=True)
class Tokens:
    """Of one iteration, if every path is as long as it may be."""

    paths: int  # all paths with their prompts, each on its own
    most: int  # different tokens, where nothing but the prompt is shared
    expected: int  # different tokens, where branches leave their parents halfway


def tokens_of(recipe: Recipe, row: Algorithm) -> Tokens:
    """An iteration's tokens; a tree is sampled and trained once a token (packing)."""
    rollout, response = recipe.reinforce.rollout, recipe.dialogue.response_tokens
    prompt = recipe.prepare.policy.context - response
    questions, leaves = recipe.reinforce.questions, rollout.leaves
    branched = 0 if row.branching == "none" else leaves - rollout.initial
    return Tokens(
        paths=questions * leaves * (prompt + response),
        most=questions * (prompt + leaves * response),
        expected=round(questions * (prompt + (leaves - HALFWAY * branched) * response)),
    )


@dataclass(frozen=True)
class Seconds:
    """Of one iteration, without tools, loading and saving."""

    update: float
    sampling: float
    abreast: int  # paths of full length for whose keys and values there is room at once


def seconds_of(recipe: Recipe, row: Algorithm, shape: Shape, card: Card) -> Seconds:
    """An estimate at PEAK_SHARE of the operations and BANDWIDTH_SHARE of the bandwidth."""
    tokens = tokens_of(recipe, row).expected
    once = _operations(shape, tokens, recipe.prepare.policy.context)
    rate = PEAK_SHARE * card.operations[recipe.machine.precision]
    abreast = rows_abreast(recipe, shape, card)
    decoding = _decoding(recipe, shape, abreast, BANDWIDTH_SHARE * card.bandwidth)
    return Seconds(
        forward_equivalents(recipe, row) * once / rate, max(once / rate, decoding), abreast
    )


def _operations(shape: Shape, tokens: int, context: int) -> float:
    """Of one forward pass: two a multiplication.

    A token is multiplied by every weight of the linear layers; and it sees half of its path on
    average, for which each layer multiplies twice the queries' width (packing, Cost).
    """
    return 2 * tokens * (shape.linear + 2 * shape.queries * shape.layers * context / 2)


def forward_equivalents(recipe: Recipe, row: Algorithm) -> float:
    """How many forward passes' worth of operations an update is.

    The backward pass is two (by inputs, by weights), with adapters one; recomputing adds one. Where
    there are several steps a batch, the old log-probabilities take another pass, a reference one,
    and a critic of its own one for its values and those of its update.
    """
    update = recipe.reinforce.update
    trained = (2 if recipe.lora else 3) + update.recompute
    steps = update.epochs * update.mini_batches
    looked = (steps > 1) + (row.kl is not None)
    own = row.critic is not None and row.critic.backbone == "own"
    return update.epochs * (trained + own * (3 + update.recompute)) + looked + own


def rows_abreast(recipe: Recipe, shape: Shape, card: Card) -> int:
    """Paths of full length that are decoded at once; vLLM lets others wait."""
    rows = recipe.reinforce.rollout.rows
    if not has_share(recipe):
        return rows
    path = recipe.prepare.policy.context * key_value(recipe, shape)
    weights = NUMBER[recipe.machine.precision] * shape.weights
    room = recipe.engine.memory * card.memory - weights - _reserve(recipe)
    return max(1, min(rows, int(room / path)))


def _decoding(recipe: Recipe, shape: Shape, abreast: int, bandwidth: float) -> float:
    """Seconds in which an iteration's paths are decoded, at so many bytes a second.

    Each step reads all weights once, and keys and values of every path, which is half long on
    average. Questions go in batches that fill rollout.rows, a batch in waves.
    """
    rollout, context = recipe.reinforce.rollout, recipe.prepare.policy.context
    batches = math.ceil(recipe.reinforce.questions / (rollout.rows // rollout.leaves))
    paths = recipe.reinforce.questions * rollout.leaves / batches
    steps = batches * math.ceil(paths / abreast) * recipe.dialogue.response_tokens
    cached = min(abreast, paths) * key_value(recipe, shape) * context / 2
    read = NUMBER[recipe.machine.precision] * shape.linear + cached
    return steps * max(STEP_SECONDS, read / bandwidth)

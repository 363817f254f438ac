"""The sizes of a recipe's model, from its transformers config, without a download."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from params.schema import architectures
from params.schema import base as schema
from params.schema.prepare import TinyPolicy
from params.schema.recipe import Recipe
from params.schema.reinforce import Lora

COUNTED = ("llama", "qwen2", "qwen3")  # architectures whose layers flows/host/gpu_memory.py counts


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
            f"is counted for {', '.join(COUNTED)} (flows/host/model_shape.py, COUNTED)"
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
    from tasks.policy import gguf_file
    from tasks.policy.lean_transformers import transformers
    from tasks.policy.tiny import tiny_config

    policy = recipe.prepare.policy
    if isinstance(policy, TinyPolicy):
        return tiny_config(policy, policy.vocabulary)
    known = architectures.load_architectures(folder).get(policy.name)
    if known and policy.revision in (known.revision, None):
        settings = dict(known.config)
        return transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    if policy.gguf:
        settings = gguf_file.config_of(policy.name, policy.gguf, policy.revision, here=True)
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

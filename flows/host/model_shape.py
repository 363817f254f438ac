"""The sizes of a recipe's model, from its transformers config, without a download."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from params import suggestions
from params.schema import architectures
from params.schema import base as schema
from params.schema.prepare import Policy, PretrainedPolicy, TinyPolicy
from params.schema.recipe import Recipe
from params.schema.reinforce import Lora
from params.schema.teacher import RunTeacher, ServerTeacher
from tasks.policy import layer_kinds
from tasks.policy.layer_kinds import LearnerForm

if TYPE_CHECKING:
    from flows.host.dry_pass import CachedLayer, Pass


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that memory and seconds depend on, in numbers of values."""

    weights: int
    backbone: int  # without an untied LM head
    linear: int  # weights of all matrices of products, including a tied LM head and all experts
    embedding: int
    head: int  # of the LM head, which may be the embedding
    adapters: int  # weights of the recipe's adapters; 0 without
    layers: int
    vocabulary: int
    form: LearnerForm  # in which it learns
    latent: int  # numbers of a token in a layer of latent attention; 0 without
    config: str  # as text
    lora: Lora | None = None
    teacher: int = 0  # weights of the policy that teaches; 0 without

    @property
    def learning(self) -> int:
        return self.adapters or self.weights

    @property
    def root(self) -> int:
        """Weights outside the layers: the embedding, and an LM head of its own."""
        return self.embedding + self.weights - self.backbone

    @property
    def layer(self) -> float:
        return (self.weights - self.root) / self.layers

    @property
    def on_trees(self) -> bool:
        return self.form.kind == layer_kinds.TREES

    def passed(self, precision: str) -> Pass:
        """Return what a pass holds and computes (flows/host/dry_pass.py). About a second, once.

        Raises ValueError for an architecture that cannot be passed without values.
        """
        from flows.host import dry_pass

        with self._explained():
            return dry_pass.measure(self.config, precision, self.lora, self.on_trees)

    @property
    def cached(self) -> tuple[CachedLayer, ...]:
        """What a sampler keeps of a path, layer by layer; () where it keeps nothing."""
        from flows.host import dry_pass

        with self._explained():
            return dry_pass.cached(self.config)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Name the architecture in what it makes of tensors without values."""
        try:
            yield
        except Exception as error:  # of any kind
            kind = json.loads(self.config)["model_type"]
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ValueError(
                f"prepare.policy is a {kind}, whose memory cannot be counted: its layers cannot be "
                f"passed without values ({reason}): see docs/gpu.md, or take another policy"
            ) from error


def shape_of(config: Any, lora: Lora | None = None) -> Shape:
    """Return the shape of a causal language model from its transformers config.

    Raises ValueError for adapters on modules that the model does not have.
    """
    from flows.host import dry_pass

    shape, linear = _measured(dry_pass.text_of(config))
    return replace(shape, adapters=_adapters(linear, lora), lora=lora) if lora else shape


@cache  # to make a model takes half a second, and its shape is asked for each card and each remedy
def _measured(config_text: str) -> tuple[Shape, dict[str, tuple[int, int]]]:
    """Return a model's shape without adapters, and the inputs and outputs of its linear layers."""
    import torch

    from flows.host import dry_pass
    from tasks.policy.logits import backbone_of

    config = dry_pass.config_of(config_text)
    with torch.device("meta"):
        model = dry_pass.model_of(config)
    text = config.get_text_config(decoder=True)
    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    looked_up = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    multiplied = {id(weight): weight.numel() for weight in model.parameters() if weight.ndim > 1}
    for weight in looked_up:
        if head is None or weight is not head.weight:
            multiplied.pop(id(weight), None)
    shape = Shape(
        weights=sum(weight.numel() for weight in model.parameters()),
        backbone=sum(weight.numel() for weight in backbone_of(model).parameters()),
        linear=sum(multiplied.values()),
        embedding=embedding.weight.numel(),
        head=head.weight.numel() if head is not None else 0,
        adapters=0,
        layers=len(dry_pass.layers_of(model)),
        vocabulary=text.vocab_size,
        form=layer_kinds.learner_form(layer_kinds.described(config)),
        latent=_latent(text),
        config=config_text,
    )
    return shape, {name: (m.in_features, m.out_features) for name, m in linear.items()}


def _latent(config: Any) -> int:
    """Return the numbers that vLLM keeps of a token in latent attention (arXiv 2405.04434, 2.1)."""
    rank = getattr(config, "kv_lora_rank", None)
    return rank + config.qk_rope_head_dim if rank else 0


def _adapters(linear: Mapping[str, tuple[int, int]], lora: Lora) -> int:
    """Count the weights of adapters: two matrices a layer, inputs x rank and rank x outputs."""
    sizes_by_module = {
        module: [sizes for name, sizes in linear.items() if name.rpartition(".")[2] == module]
        for module in lora.modules
    }
    if absent := [module for module, sizes in sizes_by_module.items() if not sizes]:
        known = sorted({name.rpartition(".")[2] for name in linear})
        raise ValueError(
            f"lora.modules names {absent[0]}, which is no linear layer of the policy"
            f"{suggestions.meant(absent[0], known)}: choose of {known}"
        )
    return sum(lora.rank * sum(sizes) for every in sizes_by_module.values() for sizes in every)


def with_teacher(shape: Shape, recipe: Recipe, folder: Path = schema.PARAMS) -> Shape:
    """Return the shape with the weights of the recipe's teacher.

    Those of a run are not here before the stage ``champion``: they count as many as the policy's.
    Raises ValueError as ``config_of``.
    """
    teacher = recipe.teacher
    if teacher is None or isinstance(teacher, ServerTeacher):
        return shape
    if isinstance(teacher, RunTeacher):
        return replace(shape, teacher=shape.weights)
    named = PretrainedPolicy.model_validate(teacher.model_dump() | {"context": 1})
    return replace(shape, teacher=shape_of(_config_of(named, folder)).weights)


def config_of(recipe: Recipe, folder: Path = schema.PARAMS) -> Any:
    """Return the transformers config of a recipe's policy, without a download.

    A tiny policy's is in the recipe, a known one's in architectures.yaml, any other one's in its
    folder or in the hub's cache. Raises ValueError where none of these has it.
    """
    return _config_of(recipe.prepare.policy, folder)


def _config_of(policy: Policy, folder: Path) -> Any:
    from tasks.policy import gguf_file
    from tasks.policy.lean_transformers import transformers
    from tasks.policy.tiny import tiny_config

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
        from tasks.recipes.contradictions import where_commits  # with rooms that sizes need not

        raise ValueError(
            f"prepare.policy.name {policy.name} at revision {policy.revision} is no row of "
            f"{folder / 'architectures.yaml'}, no folder and not in the hub's cache: add a row "
            "with its config.json, or fetch it once: `hf download "
            f"{policy.name} config.json --revision {policy.revision or '<commit>'}`. Commits: "
            f"{where_commits(policy.name)}"
        ) from None
    except Exception as error:  # what transformers raises for wrong values has no class of its own
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the config.json of prepare.policy.name {policy.name} has wrong values ({reason}): "
            "correct it, or take another policy"
        ) from error

"""Low-rank adapters of linear layers (LoRA, arXiv 2106.09685), which train instead of the policy.

A layer's product W x becomes W x + alpha / rank * B A x (section 4.1): W of the initial policy is
frozen, A [rank, input] is random, B [output, rank] starts at 0. The folder of an adapter has the
format that peft and vLLM load. It names its base by digest and by the path from the project's root,
which is the working folder of every run. Torch only.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from params.schema.reinforce import Lora
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.policy import sharding

NAME = "default"  # peft's name of the only adapter of a policy
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every name in peft's files


def attached(model: Any) -> bool:
    """Return whether the policy has an adapter."""
    return hasattr(model, "peft_config")


def attach(model: Any, settings: Lora, base: Artifact, seed: int) -> None:
    """Freeze ``model``, which was loaded from ``base``, and add an adapter drawn from ``seed``.

    The outputs of the model stay the same until the adapter has learned. Raises ValueError for a
    module name that no linear layer has.
    """
    from peft import LoraConfig

    _check(model, settings)
    alpha: Any = settings.alpha  # a float, though peft's type is int; it only divides by the rank
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=alpha,
        target_modules=list(settings.modules),
        base_model_name_or_path=base.path,
        revision=base.digest,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _inject(model, config)


def _check(model: Any, settings: Lora) -> None:
    """Raise ValueError for a module name that no linear layer has."""
    linear = _linear(model)
    if unknown := [name for name in settings.modules if name not in linear]:
        raise ValueError(
            f"lora.modules names {unknown[0]}, which is no linear layer of the policy: name some "
            f"of {', '.join(linear)}"
        )


def _linear(model: Any) -> list[str]:
    """Return the names of the linear layers of a model, the last part of each."""
    head = model.get_output_embeddings()  # it may be tied to the embeddings, which are no product
    names = {
        name.rpartition(".")[2]
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and layer is not head
    }
    return sorted(names)


def adaptable(model: Any, *names: str) -> list[str]:
    """Return which linear layers an adapter takes effect on, of ``names`` or of all; each is tried.

    Left out is what the model's pass does not call, since its code reads the weight; what peft
    refuses in the architecture; and what it takes for experts whose weights are one tensor.
    """
    linear = [name for name in _linear(model) if not names or name in names]
    return [name for name in linear if _takes_effect(model, name)]


def _takes_effect(model: Any, name: str) -> bool:
    from peft import LoraConfig

    tried, called = copy.deepcopy(model), set()
    try:
        _inject(tried, LoraConfig(r=1, target_modules=[name]))
        layers = [layer for _, layer in _layers(tried)]
        for layer in layers:
            layer.register_forward_hook(lambda one, *_: called.add(one))
        with torch.no_grad():
            tried(torch.arange(3, 35)[None], use_cache=False)
    except Exception:  # of a layer that is called in its own way, or returns more than one tensor
        return False
    return bool(called) and all(isinstance(one.get_base_layer(), torch.nn.Linear) for one in layers)


def _inject(model: Any, config: Any) -> None:
    import torch.distributed.tensor  # noqa: F401  # peft takes it for imported
    from peft import inject_adapter_in_model

    inject_adapter_in_model(config, model, NAME)


def base_of(folder: Path) -> Path | None:
    """Return the folder of the base of the adapter in ``folder``; None if that is no adapter.

    Raises RuntimeError where the base is missing or has another digest.
    """
    if not (folder / CONFIG).is_file():
        return None
    config = json.loads((folder / CONFIG).read_text())
    base, digest = Path(config["base_model_name_or_path"]), config["revision"]
    if not base.is_dir() or artifacts.digest(base) != digest:
        raise RuntimeError(
            f"{folder / CONFIG} is an adapter of the policy {base} with digest {digest}, but that "
            "folder is missing or has other content: restore it with `dvc checkout`, or run the "
            "recipe again"
        )
    return base


def load(model: Any, folder: Path) -> Any:
    """Add the adapter in ``folder`` to ``model``, its base, and return the model.

    Raises ValueError where its file has other weights than its config says.
    """
    from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict

    config = LoraConfig.from_pretrained(str(folder))
    config.inference_mode = False
    _inject(model, config)
    weights = load_file(folder / WEIGHTS)
    state = {name.removeprefix(PREFIX): weight for name, weight in weights.items()}
    own = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    if other := sorted(own.keys() ^ state.keys()):
        what = "lacks" if other[0] in own else "has"
        more = f" and {len(other) - 1} more" if other[1:] else ""
        raise ValueError(
            f"{folder / WEIGHTS} {what} {other[0]}{more}, and {CONFIG} beside it says otherwise: "
            "it is damaged, so fetch or train it again"
        )
    set_peft_model_state_dict(model, state, NAME)
    return model


def weights_of(model: Any) -> dict[str, Tensor]:
    """Return the adapter's weights by their names in peft's files, whole where they are sharded."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    return {PREFIX + name: sharding.whole(weight).contiguous() for name, weight in state.items()}


def save(model: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Write the adapter of ``model`` without its base; ``weights`` are those of ``weights_of``.

    Equal adapters give equal bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    config = {**model.peft_config[NAME].to_dict(), "inference_mode": True}
    listed = {name: sorted(v) if isinstance(v, set) else v for name, v in config.items()}
    (folder / CONFIG).write_text(json.dumps(listed, indent=2, sort_keys=True) + "\n")


def base_path(model: Any) -> Path | None:
    """Return the folder of the base of ``model``, or None without an adapter."""
    return Path(model.peft_config[NAME].base_model_name_or_path) if attached(model) else None


@contextmanager
def without(model: Any) -> Iterator[Any]:
    """Yield ``model`` with its adapter switched off, for inference."""
    layers = [layer for _, layer in _layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield model
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merged(model: Any) -> Any:
    """Return the policy with whole weights W + alpha / rank * B A, as an ordinary model.

    Layers without an adapter share their frozen weights with ``model``. A policy without an adapter
    is returned as it is.
    """
    if not attached(model):
        return model
    shared = {
        id(weight): torch.nn.Parameter(weight.detach(), requires_grad=False)
        for weight in model.parameters()
    }
    whole = copy.deepcopy(model, shared)  # deepcopy takes a weight's entry here, not a copy
    for name, layer in _layers(whole):
        plain = layer.get_base_layer()
        weight = plain.weight + layer.get_delta_weight(NAME)
        plain.weight = torch.nn.Parameter(weight, requires_grad=False)
        whole.set_submodule(name, plain)
    del whole.peft_config
    return whole


def _layers(model: Any) -> list[tuple[str, Any]]:
    """Return the layers with an adapter as (name, layer)."""
    from peft.tuners.lora import LoraLayer

    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer)]

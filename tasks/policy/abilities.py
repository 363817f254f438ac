"""What an architecture cannot do that a recipe asks of it, tried on a small copy before any work.

A layer's weight may be used without a call of the layer, and peft may put an adapter elsewhere than
its name says. No config tells so: each is tried.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from params.schema.reinforce import Lora

DENSE = ("llama", "qwen2", "qwen3")  # architectures of which it is known, without an import
DENSE_LAYERS = {
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}


def faults(config: Mapping[str, Any], lora: Lora | None, recompute: bool) -> list[str]:
    """Return a line, with key and remedy, for each setting that the architecture does not support.

    ``config``: the parsed config.json. An architecture without a small copy is not tried.
    """
    kind = str(config.get("model_type"))
    if kind in DENSE and DENSE_LAYERS.issuperset(lora.modules if lora else ()):
        return []
    found = []
    if recompute and not _recomputes(config):
        found.append(
            f"'reinforce.update.recompute' is true, and the architecture {kind} does not support "
            "gradient checkpointing: set it to false, or take another policy"
        )
    return found + (_without_effect(config, lora) if lora else [])


def _recomputes(config: Mapping[str, Any]) -> bool:
    from tasks.policy.lean_transformers import transformers

    try:
        found: Any = transformers.AutoModelForCausalLM._model_mapping[type(_config_of(config))]
    except Exception:  # of any kind; loading the policy says what is wrong with it
        return True
    return bool(found.supports_gradient_checkpointing)


def _without_effect(config: Mapping[str, Any], lora: Lora) -> list[str]:
    """Return a line on the modules where no adapter takes effect, if there are any."""
    from tasks.policy import adapter, small_copy

    try:
        model = small_copy.small_copy(_config_of(config), 2**30)
    except Exception:  # of any kind; the check of the policy says what is wrong with it
        return []
    if not (unfit := [name for name in lora.modules if name not in adapter.adaptable(model, name)]):
        return []
    names = ", ".join(adapter.adaptable(model))
    return [
        f"'lora.modules' names {', '.join(unfit)}, and in the architecture "
        f"{config.get('model_type')} no adapter takes effect there: "
        + (f"name some of {names}" if names else "set lora to null, or take another policy")
    ]


def _config_of(config: Mapping[str, Any]) -> Any:
    from tasks.policy.lean_transformers import transformers

    rest = copy.deepcopy({**config})
    return transformers.AutoConfig.for_model(rest.pop("model_type"), **rest)

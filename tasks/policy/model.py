"""Load a policy and its tokenizer from a folder or from the Hugging Face hub."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from params.schema.base import Machine
from params.schema.prepare import PretrainedPolicy
from tasks.policy import adapter

# transformers makes the weights under a setting of the whole process, so that two threads that load
# at once (reinforce.ahead) fail.
LOADING = threading.Lock()


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a policy folder exactly as it was saved.

    AutoTokenizer would use the usual class of the architecture, which splits text in its own way.
    """
    return PreTrainedTokenizerFast.from_pretrained(folder)


def fetch_policy(settings: PretrainedPolicy) -> tuple[Any, Any]:
    """Load model and tokenizer from a hub name at its pinned revision, or from a local folder."""
    tokenizer = fetch_tokenizer(settings)
    model = AutoModelForCausalLM.from_pretrained(settings.name, revision=settings.revision)
    return model, tokenizer


def fetch_tokenizer(settings: PretrainedPolicy) -> Any:
    """Load the tokenizer alone, from where ``fetch_policy`` loads it."""
    return AutoTokenizer.from_pretrained(settings.name, revision=settings.revision)


def load_policy(folder: str | Path, machine: Machine, revision: str | None = None) -> Any:
    """Load a causal language model from a folder or a hub name, in float32, on the recipe's device.

    From the folder of an adapter, load its base with the adapter; only the adapter can learn.
    Raises OSError (from transformers) where nothing is found.
    """
    if base := adapter.base_of(Path(folder)):
        return adapter.load(_load(AutoModelForCausalLM, base, machine, None), Path(folder))
    return _load(AutoModelForCausalLM, folder, machine, revision)


def load_backbone(folder: Path, machine: Machine) -> Any:
    """Load a model without its head over the vocabulary. Raises OSError as ``load_policy``."""
    return _load(AutoModel, folder, machine, None)


def _load(kind: Any, folder: str | Path, machine: Machine, revision: str | None) -> Any:
    with LOADING:
        model = kind.from_pretrained(
            folder, revision=revision, dtype=torch.float32, attn_implementation="sdpa"
        )
    return model.to(torch.device(machine.device))

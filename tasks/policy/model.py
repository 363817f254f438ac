"""Load a policy and its tokenizer from a folder or from the Hugging Face hub."""

from __future__ import annotations

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

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a policy folder, exactly as it was saved.

    AutoTokenizer would take the architecture's usual class, which splits text in its own way.
    """
    return PreTrainedTokenizerFast.from_pretrained(folder)


def fetch_policy(settings: PretrainedPolicy) -> tuple[Any, Any]:
    """Model and tokenizer of a hub name at its pinned revision, or of a local folder."""
    tokenizer = AutoTokenizer.from_pretrained(settings.name, revision=settings.revision)
    model = AutoModelForCausalLM.from_pretrained(settings.name, revision=settings.revision)
    return model, tokenizer


# Of glibc's mallopt(3): what is kept at the top, taken beyond a need, mapped on its own. Bytes.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


def load_policy(folder: str | Path, machine: Machine, revision: str | None = None) -> Any:
    """A causal language model from a folder or a hub name, on the recipe's device, in float32.

    The folder of an adapter gives its base with the adapter, which alone can learn. Raises OSError
    (from transformers) where nothing is found.
    """
    if base := adapter.base_of(Path(folder)):
        return adapter.load(_load(AutoModelForCausalLM, base, machine, None), Path(folder))
    return _load(AutoModelForCausalLM, folder, machine, revision)


def load_backbone(folder: Path, machine: Machine) -> Any:
    """The same without a head over the vocabulary."""
    return _load(AutoModel, folder, machine, None)


def _load(kind: Any, folder: str | Path, machine: Machine, revision: str | None) -> Any:
    model = kind.from_pretrained(
        folder, revision=revision, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.to(torch.device(machine.device))

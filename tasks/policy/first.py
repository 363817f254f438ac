"""The first policy of a recipe: made with random weights, or fetched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from params.schema.prepare import PretrainedPolicy, TinyPolicy
from tasks.policy import load_model, tiny


def _tiny(
    settings: TinyPolicy, texts: Sequence[str], tags: Sequence[str], seed: int
) -> tuple[Any, Any]:
    tokenizer = tiny.build_tokenizer(texts, settings, tags)
    return tiny.build_policy(settings, tokenizer, seed), tokenizer


def _pretrained(settings: PretrainedPolicy, *_: Any) -> tuple[Any, Any]:
    return load_model.fetch_policy(settings)


def _tiny_tokenizer(settings: TinyPolicy, texts: Sequence[str], tags: Sequence[str]) -> Any:
    return tiny.build_tokenizer(texts, settings, tags)


def _pretrained_tokenizer(settings: PretrainedPolicy, *_: Any) -> Any:
    return load_model.fetch_tokenizer(settings)


POLICIES: dict[str, Callable[..., tuple[Any, Any]]] = {"tiny": _tiny, "pretrained": _pretrained}
TOKENIZERS: dict[str, Callable[..., Any]] = {  # before there are traces
    "tiny": _tiny_tokenizer,
    "pretrained": _pretrained_tokenizer,
}

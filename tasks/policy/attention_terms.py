"""What architectures add to attention, in every form of it: windows, chunks, bounds, sinks.

Torch only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

WITHOUT_EFFECT = (  # arguments of attention that say again what the forest says
    *("attention_mask", "is_causal", "position_ids", "position_embeddings", "cache_position"),
    *(
        "use_cache",
        "past_key_values",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    ),
)


def refuse(dropout: float, others: Mapping[str, Any]) -> None:
    """Raise ValueError for what an architecture passes to its attention and is not computed here.

    ``others``: the arguments that no form of attention has a name for.
    """
    if dropout:
        raise ValueError(
            f"attention_dropout is {dropout}, which trees cannot have: set it to 0 in the policy's "
            "config.json"
        )
    given = sorted(name for name, value in others.items() if value is not None)
    if unknown := [name for name in given if name not in WITHOUT_EFFECT]:
        raise ValueError(
            f"the policy's attention takes {', '.join(unknown)}, which is not computed over trees "
            "yet: take another policy"
        )


def capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    *,
    softcap: float,
    scale: float | None,
) -> Tensor:
    """Attend with scores s that become c tanh(s / c) (Gemma 2, arXiv 2408.00118, section 2).

    query [R, heads, A, size], key and value [R, key-value heads, B, size], visible broadcasts to
    [R, heads, A, B]; returns [R, heads, A, size].
    """
    shared = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(shared, 1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~visible, float("-inf"))
    return torch.softmax(scores.float(), dim=-1).to(value.dtype) @ value


SINK_SIZES = 8  # more numbers of a head, one of which is used: kernels like multiples of 8


def with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Add one more key that stands for the sinks: its scores are theirs, and its value is zero.

    A sink is one more logit of a head's softmax, which takes weight from all keys (gpt-oss,
    arXiv 2508.10925, section 2.2). query [1, heads, U, size], key and value [1, key-value heads, U,
    size], sinks [heads]; ``scale`` is what scores are multiplied by. Returns them with
    ``SINK_SIZES`` more numbers a head, and key and value with one more slot. The first new number
    is sink / scale in queries, 1 in the new key and 0 in the others: heads that share keys keep
    sinks of their own, and masks stay of type bool.
    """
    size = key.shape[-1]
    heads = (sinks / scale).to(query.dtype)[:, None, None].expand(*query.shape[:3], 1)
    query = torch.cat([query, torch.nn.functional.pad(heads, (0, SINK_SIZES - 1))], dim=-1)
    key, value = (torch.nn.functional.pad(each, (0, SINK_SIZES, 0, 1)) for each in (key, value))
    key[..., -1, size] = 1
    return query, key, value


def sunk_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, sinks: Tensor, scale: float
) -> Tensor:
    """Attend with one more logit in each softmax, without a copy of the keys.

    For few queries over many keys. query [R, heads, A, size], key and value [R, heads, B, size],
    visible broadcasts to [R, heads, A, B], sinks to [R, heads, A, 1]; returns [R, heads, A, size].
    """
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~visible, float("-inf"))
    scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:3], 1)], -1)
    return torch.softmax(scores.float(), -1)[..., :-1].to(value.dtype) @ value


def less_sinks(mixed: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Take from what plain attention gives the share of the sinks: sigmoid(lse - sink) is left.

    mixed [1, heads, U, size]; log_sums [1, heads, U] are of the exponentials of its scores, and
    sinks [heads].
    """
    left = torch.sigmoid(log_sums.float() - sinks.float()[:, None])
    return mixed * left[..., None].to(mixed.dtype)


def in_window(visible: Tensor, window: int) -> Tensor:
    """Return a mask [..., A, B], whose queries see keys from 0 on, without keys before a window."""
    positions = visible.sum(-1, keepdim=True) - 1  # of the queries in their contexts
    keys = torch.arange(visible.shape[-1], device=visible.device)
    return visible & (keys > positions - window)


def in_chunk(visible: Tensor, chunk: int) -> Tensor:
    """Return a mask [..., A, B], whose queries see keys from 0 on, without keys of other chunks.

    A context is cut into chunks of so many tokens (Llama 4).
    """
    positions = visible.sum(-1, keepdim=True) - 1  # of the queries in their contexts
    keys = torch.arange(visible.shape[-1], device=visible.device)
    return visible & (keys // chunk == positions // chunk)


def chunk_of(module: Any) -> int | None:
    """Return the chunk of a layer's attention, which Llama 4 says in its masks alone, or None."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds or kinds[module.layer_idx] != "chunked_attention":
        return None
    return int(config.attention_chunk_size)  # type: ignore[union-attr]


def window_of(module: Any, told: int | None) -> int | None:
    """Return the window of a layer's attention: as told, or as its masks have it (Phi-3.5-MoE).

    Some architectures make the window a matter of their masks, which depend on their config alone.
    """
    config = getattr(module, "config", None)
    if told is not None or config is None or getattr(config, "use_sliding_window", None) is False:
        return told
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[module.layer_idx] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None) or None


def at_positions(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Return queries [1, heads, U, size] that grow with their position, not with their slot.

    Llama 4's layers without rotation scale queries by how many tokens came before, and count those
    of the pass. ``positions`` [U] are in their contexts.
    """
    if not getattr(module, "attn_temperature_tuning", None) or module.use_rope:
        return query

    def scales(before: Tensor) -> Tensor:
        return torch.log1p(torch.floor((before + 1.0) / module.floor_scale)) * module.attn_scale + 1

    counted = torch.arange(len(positions), device=query.device)
    return (query * (scales(positions) / scales(counted))[:, None]).to(query.dtype)

"""What architectures add to attention, in every form of it: windows, chunks, bounded scores.

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

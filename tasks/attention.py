"""Attention over a forest: each token looks at the tokens before it on its own path, no others.

transformers hands both forms the forest that the learner passes to the model (tasks/packing.py).
Gathered attention is for any device: rows of queries and keys, picked out of the slots, through
scaled-dot-product attention. Flex attention is for a GPU: the slots as they lie, with a block mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface

from tasks.packing import BLOCK, Forest, Layout

GATHERED, FLEX = "forest_gathered", "forest_flex"  # as transformers knows them
PAIRS: dict[str, Callable[[Layout], int]] = {  # what each of them computes of a layout
    GATHERED: lambda layout: layout.pairs,
    FLEX: lambda layout: layout.block_pairs,
}


def form_for(device: str) -> str:
    """The form of attention that suits a device."""
    return FLEX if device == "cuda" else GATHERED


@contextmanager
def attending(model: Any, form: str) -> Iterator[None]:
    """Let ``model`` attend over forests; as it was before, afterwards."""
    before = model.config._attn_implementation
    model.set_attn_implementation(form)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def gathered_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forest: Forest,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Each leaf's own tokens as queries over its whole path, leaves of similar size side by side.

    query [1, heads, U, size], key and value [1, key-value heads, U, size]; returns [1, U, heads,
    size]. The area of attention is that of the unique tokens, whatever the tree looks like.
    """
    slots = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [U, heads, size]
    mixed = []
    for bucket in forest.buckets:
        seen = torch.nn.functional.scaled_dot_product_attention(
            _pick(slots[0], bucket.queries),
            _pick(slots[1], bucket.keys),
            _pick(slots[2], bucket.keys),
            attn_mask=bucket.visible,
            scale=scaling,
            enable_gqa=True,
        )
        mixed.append(seen.transpose(1, 2).flatten(0, 1))
    return torch.cat(mixed).index_select(0, forest.places)[None], None


def _pick(slots: Tensor, rows: Tensor) -> Tensor:
    """[U, heads, size] at [rows, A] -> [rows, heads, A, size]."""
    return slots.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)


def forest_flex_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forest: Forest,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The same with flex attention, blocks without a visible pair left out. Shapes as above."""
    compute = _compiled_flex() if query.is_cuda else _flex
    mixed = compute(
        query,
        key,
        value,
        block_mask=_block_mask(forest),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(mixed, Tensor)
    return mixed.transpose(1, 2), None


_flex: Callable[..., Any] = flex_attention


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(_flex, dynamic=True)


_masks: list[tuple[Forest, BlockMask]] = []  # of the forest that the layers are at


def _block_mask(forest: Forest) -> BlockMask:
    """Slot j is visible to slot i iff it comes first and i lies in the subtree of j's node."""
    if not (_masks and _masks[0][0] is forest):
        ends, slots = forest.subtree_ends, forest.tokens.shape[1]

        def visible(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j <= i) & (i < ends[j])

        device = str(ends.device)
        made = create_block_mask(visible, None, None, slots, slots, device=device, BLOCK_SIZE=BLOCK)
        _masks[:] = [(forest, made)]
    return _masks[0][1]


AttentionInterface.register(GATHERED, gathered_attention)
AttentionInterface.register(FLEX, forest_flex_attention)

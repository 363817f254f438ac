"""Attention over a forest: a token attends to the tokens before it in its own context alone.

A context is a path, or what a fresh prompt cuts off from it.

The learner passes the forest (tasks/learning/packing.py) to the model, and transformers passes it
on to both forms. Gathered attention works on any device: it selects rows of queries and keys from
the slots for scaled-dot-product attention. Flex attention is for a GPU: it computes over all slots
in their order, with a block mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tasks.learning.packing import BLOCK, Forest, Layout
from tasks.policy.lean_transformers import transformers

GATHERED, FLEX = "forest_gathered", "forest_flex"  # their names in transformers
KINDS = 64  # types, head sizes, forests of one block, with gradients, autocast: 8 are soon there
PAIRS: dict[str, Callable[[Layout], int]] = {  # how many (query, key) pairs each form computes
    GATHERED: lambda layout: layout.pairs,
    FLEX: lambda layout: layout.block_pairs,
}


def form_for(device: str) -> str:
    """Return the form of attention for a device."""
    return FLEX if device == "cuda" else GATHERED


@contextmanager
def attending(model: Any, form: str) -> Iterator[None]:
    """Let ``model`` attend over forests inside this context; restore its attention after."""
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
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend with each context's own tokens as queries over all of it, bucket by bucket.

    query [1, heads, U, size], key and value [1, key-value heads, U, size]; returns [1, U, heads,
    size]. The number of queries is that of unique tokens, whatever the shape of the tree.
    Raises ValueError for dropout or a sliding window shorter than the longest context.
    """
    _refuse(forest, dropout, sliding_window)
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


def _refuse(forest: Forest, dropout: float, sliding_window: int | None) -> None:
    """Raise ValueError for settings that neither form supports."""
    if dropout:
        raise ValueError(
            f"attention_dropout is {dropout}, which trees cannot have: set it to 0 in the policy's "
            "config.json"
        )
    if sliding_window is not None and sliding_window < forest.longest:
        raise ValueError(
            f"the policy attends over a window of {sliding_window} tokens, and a context has "
            f"{forest.longest}: lower dialogue.response_tokens, or take another policy"
        )


def _pick(slots: Tensor, rows: Tensor) -> Tensor:
    """Select rows [R, A] from slots [U, heads, size]. [R, heads, A, size]"""
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
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend over all slots with flex attention, which skips blocks without a visible pair.

    Shapes and errors are those of ``gathered_attention``.
    """
    _refuse(forest, dropout, sliding_window)
    # Under autocast rotated queries and keys are float32 and values are not; flex needs one type.
    query, key = query.to(value.dtype), key.to(value.dtype)
    compute: Any = _compiled_flex() if query.is_cuda else flex_attention
    mixed = compute(
        query,
        key,
        value,
        block_mask=block_mask(forest),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(mixed, Tensor)
    return mixed.transpose(1, 2), None


@cache
def _compiled_flex() -> Callable[..., Any]:
    """Return flex attention as one kernel, which torch compiles for each kind of its tensors.

    At torch's limit of kinds the next one would get attention with all scores in memory instead.
    The kernel that torch takes for fewer than 128 slots cannot be made for lengths that change
    (torch 2.11, NoValidChoicesError), so the usual one is named.
    """
    import torch._dynamo

    settings: Any = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, KINDS)
    compiled = torch.compile(flex_attention, dynamic=True)
    return partial(compiled, kernel_options={"BACKEND": "TRITON"})


_masks: WeakKeyDictionary[Forest, BlockMask] = WeakKeyDictionary()  # one for all layers


def block_mask(forest: Forest) -> BlockMask:
    """Return the mask: slot i sees slot j iff j <= i and i is in the subtree of j's node.

    The ends of subtrees decide which blocks have such a pair, so no [U, U] mask is made.
    """
    if forest not in _masks:
        ends, slots = forest.subtree_ends, forest.tokens.shape[1]

        def visible(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j <= i) & (i < ends[j])

        some, every = _blocks(ends)
        _masks[forest] = BlockMask.from_kv_blocks(
            *_listed(some & ~every),
            *_listed(every),
            BLOCK_SIZE=BLOCK,
            mask_mod=visible,
            seq_lengths=(slots, slots),
        )
    return _masks[forest]


def _blocks(ends: Tensor) -> tuple[Tensor, Tensor]:
    """Flag blocks of (queries, keys) with some visible pair, and with only such.

    ``ends`` [U]; both results are [blocks, blocks].
    """
    slots = len(ends)
    number = torch.arange(-(-slots // BLOCK), device=ends.device)
    starts, stops = number * BLOCK, (number * BLOCK + BLOCK).clamp(max=slots)
    padding = len(number) * BLOCK - slots
    last = torch.nn.functional.pad(ends, (0, padding), value=0).view(-1, BLOCK).amax(1)
    least = torch.nn.functional.pad(ends, (0, padding), value=slots).view(-1, BLOCK).amin(1)
    below = number[:, None] > number
    itself = number[:, None] == number
    return itself | (below & (starts[:, None] < last)), below & (stops[:, None] <= least)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row of ``blocks`` how many are set, and their indices, set ones first.

    [1, 1, blocks] and [1, 1, blocks, blocks], int32, as ``BlockMask.from_kv_blocks`` takes them.
    """
    order = blocks.byte().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


transformers.AttentionInterface.register(GATHERED, gathered_attention)
transformers.AttentionInterface.register(FLEX, forest_flex_attention)

"""Attention over a forest: a token attends to the tokens before it in its own context alone.

A context is a path, or what a fresh prompt cuts off from it.

The learner passes the forest (tasks/learning/packing.py) to the model, and transformers passes it
on to both forms. Gathered attention works on any device: it selects rows of queries and keys from
the slots for scaled-dot-product attention. Flex attention is for a GPU: it computes over all slots
in their order, with a block mask. Layers that carry a state, or convolve, are in recurrent.py. A
model whose layers have no form on trees keeps its own attention, and computes rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.weak import WeakIdKeyDictionary

from tasks.learning.linear_layers import by_onednn
from tasks.learning.packing import (
    BLOCK,
    LEAVES_APART,
    TREES_APART,
    Bucket,
    Forest,
    Grouping,
    Layout,
    row_tokens,
    slots_of,
)
from tasks.learning.recurrent import going_along
from tasks.policy import layer_kinds, world
from tasks.policy.attention_terms import (
    at_positions,
    capped_attention,
    chunk_of,
    in_chunk,
    in_window,
    less_sinks,
    refuse,
    window_of,
    with_sinks,
)
from tasks.policy.lean_transformers import transformers

GATHERED, FLEX = "forest_gathered", "forest_flex"  # their names in transformers
ROWS = "rows"  # no attention of ours
KINDS = 64  # types, head sizes, forests of one block, with gradients, autocast: 8 are soon there
PAIRS: dict[str, Callable[[Layout], int]] = {  # how many (query, key) pairs each form computes
    GATHERED: lambda layout: layout.pairs,
    FLEX: lambda layout: layout.block_pairs,
    ROWS: lambda layout: layout.row_pairs,
}
TOKENS: dict[str, Callable[..., int]] = {  # and how many tokens
    GATHERED: slots_of,
    FLEX: slots_of,
    ROWS: lambda layout, taken=None: row_tokens(layout, taken, together()),
}
APART: dict[str, Sequence[Grouping]] = {  # in which groupings it may compute fewer pairs
    GATHERED: (),
    FLEX: (TREES_APART, LEAVES_APART),  # a shared block of keys is computed for all of the blocks
    ROWS: (),
}


def form_of(model: Any, device: str) -> str:
    """Return the form in which a model learns on a device: of attention over forests, or rows."""
    kind, _ = layer_kinds.learner_form(layer_kinds.described(model.config))
    return form_for(device) if kind == layer_kinds.TREES else ROWS


def form_for(device: str) -> str:
    """Return the form of attention over forests for a device."""
    return FLEX if device == "cuda" else GATHERED


def over_forests(model: Any) -> bool:
    """Return whether a model attends over forests now."""
    return model.config._attn_implementation in (GATHERED, FLEX)


def together() -> bool:
    """Return whether all rows of a forest go through a model in one batch.

    Where its weights are sharded, all processes have to make the same number of passes.
    """
    return world.size() > 1


@contextmanager
def attending(model: Any, form: str) -> Iterator[None]:
    """Let ``model`` compute in a form inside this context; restore its layers after.

    Threads may share the context. Raises RuntimeError for a second one of the same model.
    """
    if form == ROWS:
        with by_onednn(model):
            yield
        return
    if over_forests(model):  # the first to end would take the layers from the other
        raise RuntimeError(
            f"{type(model).__name__} computes trees already, in another thread or an outer call: "
            "let that end first, or use a copy of the model"
        )
    before = model.config._attn_implementation
    model.set_attn_implementation(form)
    if not over_forests(model):  # transformers leaves attention of another making as it is
        raise ValueError(
            f"the attention of {type(model).__name__} cannot be set, so no tree goes through it: "
            "take another policy"
        )
    try:
        with going_along(model), by_onednn(model):
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
    forest: Forest | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend with each context's own tokens as queries over all of it, bucket by bucket.

    query [1, heads, U, size], key and value [1, key-value heads, U, size], where values may have
    another size; returns [1, U, heads, size of values]. The number of queries is that of unique
    tokens, whatever the shape of the tree. In a layer with a window, a token sees those of its
    context that are less than it before the token; in one with chunks, those of its context that
    are in the same chunk. ``s_aux`` [heads]: sinks, one more logit of each head's softmax.
    Raises ValueError for dropout, and for what an architecture adds that is not computed here.
    """
    forest = _checked(forest, dropout, softcap, s_aux, others)
    query, size = at_positions(module, query, forest.positions[0]), value.shape[-1]
    if s_aux is not None:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        query, key, value = with_sinks(query, key, value, s_aux, scaling)
    slots = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [U, heads, size]
    attend = partial(capped_attention, softcap=softcap) if softcap else _plain
    mixed = []
    window, chunk = window_of(module, sliding_window), chunk_of(module)
    seen_by = visible_in(forest, window, chunk, s_aux is not None)
    for bucket, (keys, visible) in zip(forest.buckets, seen_by, strict=True):
        picked = zip(slots, (bucket.queries, keys, keys), strict=True)
        seen = attend(*(_pick(*pair) for pair in picked), visible, scale=scaling)
        mixed.append(seen.transpose(1, 2).flatten(0, 1))
    return torch.cat(mixed).index_select(0, forest.places)[None, ..., :size], None


_plain = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)


def _checked(
    forest: Forest | None,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
    others: Mapping[str, Any],
) -> Forest:
    """Return the forest. Raises ValueError where layers did not pass it on, and as ``refuse``."""
    forest = forest or _with_positions(others.get("position_ids"))
    if forest is None:
        raise ValueError(
            "the policy's layers do not pass on what they are given to their attention, so no tree "
            "goes through them: take another policy"
        )
    if sinks is not None:
        others = {**others, "s_aux together with softcap": softcap}
    refuse(dropout, others)
    return forest


def remember(forest: Forest) -> None:
    """Let attention find the forest by its positions: layers of StableLM pass on no more."""
    _forests[forest.positions] = ref(forest)


def _with_positions(positions: Tensor | None) -> Forest | None:
    found = None if positions is None else _forests.get(positions)
    return found and found()


_forests: Any = WeakIdKeyDictionary()  # positions -> their forest
Sight = tuple[int | None, int | None, bool]  # window and chunk of a layer, and whether it has sinks
KeysSeen = tuple[Tensor, Tensor]  # of a bucket: keys [R, B], and which each query sees [R, 1, A, B]


def visible_in(
    forest: Forest, window: int | None, chunk: int | None, sinks: bool = False
) -> list[KeysSeen]:
    """Return the keys of each bucket, and which each query sees, in a layer with one of both.

    The mask is that of the bucket without keys that are ``window`` tokens or more before the query,
    or in another ``chunk``. ``sinks``: all see one more key, which comes after all slots.
    """
    sight = (_shorter(forest, window), _shorter(forest, chunk), sinks)
    found = _visible.setdefault(forest, {})
    if sight not in found:
        found[sight] = [_seen(bucket, sight, len(forest.places)) for bucket in forest.buckets]
    return found[sight]


def _seen(bucket: Bucket, sight: Sight, slots: int) -> KeysSeen:
    window, chunk, sinks = sight
    seen = in_window(bucket.visible, window) if window else bucket.visible
    seen = seen & in_chunk(bucket.visible, chunk) if chunk else seen
    if not sinks:
        return bucket.keys, seen
    pad = torch.nn.functional.pad
    return pad(bucket.keys, (0, 1), value=slots), pad(seen, (0, 1), value=True)


_visible: WeakKeyDictionary[Forest, dict[Sight, list[KeysSeen]]] = WeakKeyDictionary()


def _shorter(forest: Forest, size: int | None) -> int | None:
    """Return the size of a window or chunk; None where no context is longer."""
    return None if size is None or size >= forest.longest else size


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
    forest: Forest | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend over all slots with flex attention, which skips blocks without a visible pair.

    Shapes and errors are those of ``gathered_attention``.
    """
    forest = _checked(forest, dropout, softcap, s_aux, others)
    query = at_positions(module, query, forest.positions[0])
    # Under autocast rotated queries and keys are float32 and values are not; flex needs one type.
    query, key = query.to(value.dtype), key.to(value.dtype)
    compute: Any = _compiled_flex(_is_wide(query)) if query.is_cuda else flex_attention
    mixed = compute(
        query,
        key,
        value,
        block_mask=block_mask(forest, window_of(module, sliding_window), chunk_of(module)),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        **({"score_mod": _capped(softcap)} if softcap else {}),
        **({"return_aux": AuxRequest(lse=True)} if s_aux is not None else {}),
    )
    if s_aux is not None:
        mixed, sums = mixed
        mixed = less_sinks(mixed, sums.lse, s_aux)
    assert isinstance(mixed, Tensor)
    return mixed.transpose(1, 2), None


def _is_wide(query: Tensor) -> bool:
    """Return whether the usual blocks exceed a chip's memory: DeepSeek's 192 numbers in float32."""
    return query.dtype == torch.float32 and query.shape[-1] > 128


@cache
def _compiled_flex(wide: bool) -> Callable[..., Any]:
    """Return flex attention as one kernel, which torch compiles for each kind of its tensors.

    ``wide``: in smaller blocks. At torch's limit of kinds the next one would get attention with all
    scores in memory instead. The kernel that torch takes for fewer than 128 slots cannot be made
    for lengths that change (torch 2.11, NoValidChoicesError), so the usual one is named.
    """
    import torch._dynamo

    settings: Any = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, KINDS)
    compiled = torch.compile(flex_attention, dynamic=True)
    options: Any = {"BACKEND": "TRITON", **({"BLOCK_M": 32, "BLOCK_N": 32} if wide else {})}
    return partial(compiled, kernel_options=options)


@cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    """Return how flex attention changes a score: s becomes c tanh(s / c)."""

    def cap(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


# one mask for all layers of a kind
_masks: WeakKeyDictionary[Forest, dict[tuple[int | None, int | None], BlockMask]] = (
    WeakKeyDictionary()
)


def block_mask(forest: Forest, window: int | None = None, chunk: int | None = None) -> BlockMask:
    """Return the mask: slot i sees slot j iff j <= i and i is in the subtree of j's node.

    With a window, also position(i) - position(j) < window, with positions in their context; with
    a chunk, position(i) // chunk = position(j) // chunk. The ends of subtrees decide which blocks
    have such a pair, so no [U, U] mask is made.
    """
    window, chunk = _shorter(forest, window), _shorter(forest, chunk)
    masks = _masks.setdefault(forest, {})
    if (window, chunk) not in masks:
        ends, positions = forest.subtree_ends, forest.positions[0]

        def visible(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j <= i) & (i < ends[j])

        def near(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return visible(batch, head, i, j) & (positions[i] - positions[j] < reach)

        def same(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return near(batch, head, i, j) & (positions[i] // length == positions[j] // length)

        some, every = _blocks(ends)
        reach, length = window or forest.longest, chunk or forest.longest
        if window:
            some, every = _near_blocks(some, every, positions, window)
        if chunk:
            some, every = _blocks_of_chunks(some, every, positions // chunk)
        masks[window, chunk] = BlockMask.from_kv_blocks(
            *_listed(some & ~every),
            *_listed(every),
            BLOCK_SIZE=BLOCK,
            mask_mod=same if chunk else near if window else visible,
            seq_lengths=(len(ends), len(ends)),
        )
    return masks[window, chunk]


def _near_blocks(
    some: Tensor, every: Tensor, positions: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """Leave out blocks whose queries are a window or more behind all keys; ``positions`` [U].

    ``some`` and ``every`` are of ``_blocks``, and so is the result.
    """
    least, most = _bounds(positions)
    return some & (least[:, None] - most < window), every & (most[:, None] - least < window)


def _blocks_of_chunks(some: Tensor, every: Tensor, chunks: Tensor) -> tuple[Tensor, Tensor]:
    """Leave out blocks whose queries are in later chunks than all keys; ``chunks`` [U] of slots.

    ``some`` and ``every`` are of ``_blocks``, and so is the result.
    """
    least, most = _bounds(chunks)
    inside = (least[:, None] == most[:, None]) & (least == most) & (least[:, None] == least)
    return some & (least[:, None] <= most), every & inside


def _bounds(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the highest value [blocks] of each block of slots; ``values`` [U]."""
    padded = torch.cat([values, values[-1:].expand(-len(values) % BLOCK)])
    blocks = padded.view(-1, BLOCK)
    return blocks.amin(1), blocks.amax(1)


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

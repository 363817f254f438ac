"""The forward pass of a Qwen2 or Llama over a cache on a CPU, in as few operations as possible.

For a policy of a few million weights half of a decoding step is calls of modules; for a larger one
it is products of few rows and the reading of keys and values. This pass gives the numbers of
transformers' own, with one product for query, key and value and one for both halves of the
feed-forward layer, weights laid out for few rows (products.py), rotary positions applied in place,
and keys that all rows share read once (shared_attention.py). Other architectures take transformers'
own.

In bfloat16, products and attention are as in the learner's pass (tasks/policy/machine.py): weights,
keys and values are cast, while embeddings, norms, rotary positions and the sums of the residual
stream stay in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from tasks.engines.transformers.cache import Network, RaggedCache
from tasks.engines.transformers.shared_attention import attend
from tasks.policy import products, token_ids
from tasks.policy.products import SMALL, product

ARCHITECTURES = ("Qwen2ForCausalLM", "LlamaForCausalLM")
KINDS = (torch.float32, torch.bfloat16)
MOST_COPIED = 2**31  # bytes of weights that are copied, packed, where no cast has to be made
SHARED = 1024  # positions x rows that share them from which reading these once is faster
SCORES = 2**24  # of queries and keys that are computed at once: bounds memory


@dataclass(frozen=True)
class Layer:
    """The weights of one layer, as ``product`` takes them; those of the same input in one."""

    attention_norm: Tensor
    query_key_value: Tensor  # the two numbers of a rotation lie side by side in each head
    query_key_value_bias: Tensor | None
    output: Tensor
    feed_forward_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Decoder:
    """A policy's weights at one moment; made for each session."""

    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Tensor  # of the ids up to the last that has a token
    epsilon: float
    heads: int
    key_value_heads: int
    head_size: int
    rotations: Tensor  # [positions, 1, half a head's size], complex
    scales: Tensor  # [heads of queries and keys, 1]: of queries, what their products are scaled by
    kind: torch.dtype  # of products, keys and values


def network(decoder: Decoder) -> Network:
    """Return the forward pass as a session uses it."""
    return Network(
        layers=len(decoder.layers),
        key_value_heads=decoder.key_value_heads,
        head_size=decoder.head_size,
        like=torch.empty(0, dtype=decoder.kind),
        last_states=partial(last_states, decoder),
        head=partial(product, weight=decoder.head),
    )


def decodes(model: Any, kind: torch.dtype | None = None) -> bool:
    """Return whether this pass can compute the model in a precision, and is fast in it.

    Where products are in the precision of the weights, the copy that it takes has to be affordable.
    """
    kind = kind or model.dtype
    if model.device.type != "cpu" or kind not in KINDS or not _fits(model):
        return False
    if is_small(model, kind):
        return True
    cast = kind is not torch.float32
    return products.has_onednn() and (cast or 4 * model.num_parameters() <= MOST_COPIED)


def is_small(model: Any, kind: torch.dtype | None = None) -> bool:
    """Return whether a model samples best in several processes, each with its own thread."""
    whole = (kind or model.dtype) is torch.float32
    return whole and model.num_parameters() <= SMALL


@torch.inference_mode()
def decoder(model: Any, context: int, kind: torch.dtype | None = None) -> Decoder:
    """Return the model's weights as they are now, with rotations for ``context`` positions.

    ``kind``: the precision of products; that of the weights, where none is given.
    """
    kind = kind or model.dtype
    config, weight = model.config, model.get_input_embeddings().weight
    base, turns = model.base_model, rotations(model, context)
    size = 2 * turns.shape[-1]
    heads, key_value_heads = config.num_attention_heads, config.num_key_value_heads
    laid_out = products.transposed if is_small(model, kind) else products.packed
    laid = _Layout(kind, size, laid_out)
    return Decoder(
        embedding=weight,
        layers=[laid.layer(layer) for layer in base.layers],
        norm=base.norm.weight.float(),
        head=laid.weight(model.get_output_embeddings().weight[: token_ids.of(model).end]),
        epsilon=config.rms_norm_eps,
        heads=heads,
        key_value_heads=key_value_heads,
        head_size=size,
        rotations=turns,
        scales=torch.tensor([size**-0.5] * heads + [1.0] * key_value_heads)[:, None],
        kind=kind,
    )


def rotations(model: Any, context: int) -> Tensor:
    """Return the rotations of rotary positions: [positions, 1, half a head's size], complex."""
    cosines, sines = model.base_model.rotary_emb(torch.zeros(1), torch.arange(context)[None])
    size = cosines.shape[-1]
    halves = (part[0, :, None, : size // 2] for part in (cosines, sines))
    return torch.complex(*halves)


def _fits(model: Any) -> bool:
    """Return whether the layers are those that ``hidden_states`` computes."""
    if type(model).__name__ not in ARCHITECTURES:
        return False
    config, first = model.config, model.base_model.layers[0]
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    biased = (first.self_attn.o_proj, first.mlp.down_proj, model.get_output_embeddings())
    return (
        rope == "default"
        and config.hidden_act == "silu"
        and kinds == {"full_attention"}
        and all(part.bias is None for part in biased)
    )


@dataclass(frozen=True)
class _Layout:
    """How weights are laid out for products."""

    kind: torch.dtype
    size: int  # of a head
    laid_out: Callable[[Tensor], Tensor]

    def weight(self, *parts: Tensor) -> Tensor:
        """Return weights [output, input], one below the other, for a product."""
        cast = [part.to(self.kind) for part in parts]
        return self.laid_out(cast[0] if len(cast) == 1 else torch.cat(cast))

    def layer(self, layer: Any) -> Layer:
        """Return a layer's weights."""
        attention, feed_forward = layer.self_attn, layer.mlp
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        weights, biases = ([getattr(p, name) for p in parts] for name in ("weight", "bias"))
        return Layer(
            attention_norm=layer.input_layernorm.weight.float(),
            query_key_value=self.weight(_in_pairs(weights, self.size)),
            query_key_value_bias=(
                None if biases[0] is None else _in_pairs(biases, self.size).to(self.kind)
            ),
            output=self.weight(attention.o_proj.weight),
            feed_forward_norm=layer.post_attention_layernorm.weight.float(),
            gate_up=self.weight(feed_forward.gate_proj.weight, feed_forward.up_proj.weight),
            down=self.weight(feed_forward.down_proj.weight),
        )


def _in_pairs(parts: Sequence[Tensor], size: int) -> Tensor:
    """Return weights or biases of query, key and value, one below the other, [heads * size, ...].

    Within the heads of query and key the two halves alternate, as the parts of complex numbers do;
    products of query and key stay the same.
    """
    query, key, value = parts
    paired = [part.unflatten(0, (-1, size))[:, pairs(size)].flatten(0, 1) for part in (query, key)]
    return torch.cat([*paired, value])


def pairs(size: int) -> Tensor:
    """Return the order [size] of a head's numbers in which the two of a rotation are neighbours."""
    return torch.arange(size).view(2, -1).t().flatten()


@dataclass(frozen=True)
class Fed:
    """What a pass feeds: which tokens of [rows, fed] are real, and where they go."""

    real: Tensor | None  # their places among rows x fed; None: all are
    rows: Tensor  # [tokens] of the cache
    positions: Tensor  # [tokens]
    rotations: Tensor  # [tokens, heads of queries and keys, half a head's size], complex
    shared: int  # first positions that hold the same in all rows
    mask: Tensor  # of the positions after these; see _mask


def last_states(decoder: Decoder, tokens: Tensor, last: Tensor, cache: RaggedCache) -> Tensor:
    """Return the hidden states [rows, hidden] of one token of each row: that at ``last`` [rows].

    ``tokens`` [rows, fed] go to ``cache.positions``; those after ``last`` are padding, and left
    out. In the last layer all others have keys and values, and no more: the rest is computed for
    the wanted tokens alone.
    """
    fed = _fed(decoder, last, cache)
    flat = tokens.flatten() if fed.real is None else tokens.flatten()[fed.real]
    states = embedding(flat, decoder.embedding).float()  # [tokens, hidden]
    for number, layer in enumerate(decoder.layers):
        query = _project(decoder, layer, number, states, fed, cache)
        if layer is decoder.layers[-1] and tokens.shape[1] > 1:
            wanted = last + tokens.shape[1] * torch.arange(len(tokens))
            if fed.real is not None:
                wanted = torch.searchsorted(fed.real, wanted)
            states, query = states[wanted], query[wanted]
            positions = cache.positions.flatten()[wanted] if fed.real is None else None
            positions = fed.positions[wanted] if positions is None else positions
            mask = _mask(decoder, positions[:, None], fed.shared, cache.visible)
            fed = replace(fed, real=None, mask=mask)
        states = _mix(decoder, layer, states, _attended(decoder, query, number, fed, cache))
    normed = rms_norm(states, states.shape[-1:], decoder.norm, decoder.epsilon)
    return normed.to(decoder.kind)


def _fed(decoder: Decoder, last: Tensor, cache: RaggedCache) -> Fed:
    count = cache.positions.shape[1]
    real = None
    if count > 1:
        is_real = torch.arange(count) <= last[:, None]
        real = None if bool(is_real.all()) else is_real.flatten().nonzero()[:, 0]
    rows, positions = cache.places(real)
    shared = cache.shared if cache.shared * len(last) >= SHARED else 0
    return Fed(
        real=real,
        rows=rows,
        positions=positions,
        rotations=decoder.rotations[positions] * decoder.scales,
        shared=shared,
        mask=_mask(decoder, cache.positions, shared, cache.visible),
    )


def _mask(decoder: Decoder, positions: Tensor, first: int, visible: int) -> Tensor:
    """Return what queries at ``positions`` [rows, fed] see from position ``first`` on: 0, or -inf.

    [rows, 1, shared * fed, visible - first] for the heads that share keys; one row of it serves all
    heads of a single position.
    """
    sees = torch.arange(first, visible) <= positions[:, None, :, None]
    if positions.shape[1] > 1:
        sees = sees.repeat(1, 1, decoder.heads // decoder.key_value_heads, 1)
    return torch.zeros(sees.shape).masked_fill_(~sees, -torch.inf)


def _project(
    decoder: Decoder, layer: Layer, number: int, states: Tensor, fed: Fed, cache: RaggedCache
) -> Tensor:
    """Write keys and values; return queries [tokens, heads, size], already scaled."""
    heads = decoder.heads
    normed = rms_norm(states, states.shape[-1:], layer.attention_norm, decoder.epsilon)
    weight, bias = layer.query_key_value, layer.query_key_value_bias
    mixed = product(normed.to(decoder.kind), weight, bias).float()
    mixed = mixed.view(len(mixed), heads + 2 * decoder.key_value_heads, decoder.head_size)
    # rotary position embedding (arXiv 2104.09864, equation 13)
    rotated = torch.view_as_complex(mixed.unflatten(-1, (-1, 2)))
    rotated[:, : heads + decoder.key_value_heads] *= fed.rotations  # in place, in ``mixed``
    mixed = mixed.to(decoder.kind)
    keys_values = mixed[:, heads:].unflatten(1, (2, -1))
    cache.write(keys_values, number, fed.rows, fed.positions)
    return mixed[:, :heads]


def _attended(decoder: Decoder, query: Tensor, number: int, fed: Fed, cache: RaggedCache) -> Tensor:
    """Return what queries [tokens, heads, size] see, [tokens, heads * size]."""
    rows, shared = len(fed.mask), fed.shared
    if fed.real is not None:
        padded = query.new_zeros(cache.positions.numel(), *query.shape[1:])
        padded[fed.real] = query
        query = padded
    key, value = cache.seen(number)
    # query heads that share a key-value head are treated as further positions
    query = query.unflatten(0, (rows, -1)).transpose(1, 2)  # [rows, heads, fed, size]
    count = query.shape[2]
    query = query.reshape(rows, decoder.key_value_heads, -1, decoder.head_size)
    if query.shape[0] * query.shape[1] * query.shape[2] * cache.visible > SCORES:
        mask = torch.nn.functional.pad(fed.mask, (shared, 0)).to(decoder.kind)
        seen = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1.0)
    else:
        seen = attend(query, key, value, fed.mask, shared)
    seen = seen.reshape(rows, decoder.heads, count, -1).transpose(1, 2).flatten(0, 1).flatten(1)
    return seen if fed.real is None else seen[fed.real]


def _mix(decoder: Decoder, layer: Layer, states: Tensor, seen: Tensor) -> Tensor:
    """Return the states [tokens, hidden] after attention and the feed-forward layer."""
    states = states + product(seen, layer.output)
    normed = rms_norm(states, states.shape[-1:], layer.feed_forward_norm, decoder.epsilon)
    gate, up = product(normed.to(decoder.kind), layer.gate_up).chunk(2, -1)
    return states + product(silu(gate).mul_(up), layer.down)

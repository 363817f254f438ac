"""The forward pass of a small Qwen2 or Llama over a cache, in as few operations as possible.

For a policy of a few million weights on a CPU, half of a decoding step is calls of modules. This
pass gives the numbers of transformers' own, with one product for query, key and value and one for
both halves of the feed-forward layer, weights laid out for few rows, and rotary positions applied
in place. Larger policies gain nothing and other architectures differ: they take transformers' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from tasks.engines.transformers.cache import Network, RaggedCache
from tasks.policy import token_ids

ARCHITECTURES = ("Qwen2ForCausalLM", "LlamaForCausalLM")
LARGEST = 50_000_000  # weights of a policy; they are copied once a session


@dataclass(frozen=True)
class Layer:
    """The weights of one layer, [input, output] each; products of the same input share a matrix."""

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
    head: Tensor  # [hidden, ids up to the last that has a token]
    epsilon: float
    heads: int
    key_value_heads: int
    head_size: int
    rotations: Tensor  # [positions, 1, half a head's size], complex


def network(decoder: Decoder) -> Network:
    """Return the forward pass as a session uses it."""
    return Network(
        layers=len(decoder.layers),
        key_value_heads=decoder.key_value_heads,
        head_size=decoder.head_size,
        like=decoder.embedding,
        last_states=partial(last_states, decoder),
        head=partial(torch.matmul, other=decoder.head),
    )


def decodes(model: Any) -> bool:
    """Return whether this pass can compute the model, and is faster than transformers' own."""
    on_cpu = model.device.type == "cpu" and model.dtype == torch.float32
    return on_cpu and _fits(model) and model.num_parameters() <= LARGEST


@torch.inference_mode()
def decoder(model: Any, context: int) -> Decoder:
    """Return the model's weights as they are now, with rotations for ``context`` positions."""
    config, weight = model.config, model.get_input_embeddings().weight
    base = model.base_model
    cosines, sines = base.rotary_emb(weight, torch.arange(context)[None])
    size = cosines.shape[-1]
    halves = (part[0, :, None, : size // 2] for part in (cosines, sines))
    return Decoder(
        embedding=weight,
        layers=[_layer(layer, size) for layer in base.layers],
        norm=base.norm.weight,
        head=_transposed(model.get_output_embeddings().weight[: token_ids.of(model).end]),
        epsilon=config.rms_norm_eps,
        heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        head_size=size,
        rotations=torch.complex(*halves),
    )


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


def _layer(layer: Any, size: int) -> Layer:
    attention, feed_forward = layer.self_attn, layer.mlp
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    weights, biases = ([getattr(p, name) for p in parts] for name in ("weight", "bias"))
    return Layer(
        attention_norm=layer.input_layernorm.weight,
        query_key_value=_transposed(_in_pairs(weights, size)),
        query_key_value_bias=None if biases[0] is None else _in_pairs(biases, size),
        output=_transposed(attention.o_proj.weight),
        feed_forward_norm=layer.post_attention_layernorm.weight,
        gate_up=_transposed(
            torch.cat([feed_forward.gate_proj.weight, feed_forward.up_proj.weight])
        ),
        down=_transposed(feed_forward.down_proj.weight),
    )


def _transposed(weight: Tensor) -> Tensor:
    """Return [output, input] as [input, output]: the product of few rows is up to twice as fast."""
    return weight.t().contiguous()


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


def last_states(decoder: Decoder, tokens: Tensor, last: Tensor, cache: RaggedCache) -> Tensor:
    """Return the hidden states [rows, hidden] of one token of each row: that at ``last`` [rows].

    ``tokens`` [rows, fed] go to ``cache.positions``. In the last layer all of them have keys and
    values, and no more: the rest is computed for the wanted tokens alone.
    """
    each, fed = torch.arange(len(tokens)), tokens.shape[1]
    shared = decoder.heads // decoder.key_value_heads
    mask = _mask(cache.positions, cache.visible, shared)
    rotations = decoder.rotations[cache.positions]
    states = embedding(tokens.flatten(), decoder.embedding)  # [rows * fed, hidden]
    for number, layer in enumerate(decoder.layers):
        query, key, value = _project(decoder, layer, number, states, rotations, cache)
        if layer is decoder.layers[-1] and fed > 1:
            states = states.unflatten(0, (-1, fed))[each, last]
            query = query[each, last][:, None]
            mask = _mask(cache.positions[each, last][:, None], cache.visible, shared)
        states = _mix(decoder, layer, states, query, key, value, mask)
    return rms_norm(states, states.shape[-1:], decoder.norm, decoder.epsilon)


def _mask(positions: Tensor, visible: int, shared: int) -> Tensor:
    """Return what queries at ``positions`` [rows, fed] see: 0, or -inf where they do not.

    [rows, 1, shared * fed, visible]: one row of it serves all heads of a single position.
    """
    sees = torch.arange(visible) <= positions[:, None, :, None]
    sees = sees if positions.shape[1] == 1 else sees.repeat(1, 1, shared, 1)
    return torch.zeros(sees.shape).masked_fill_(~sees, -torch.inf)


def _project(
    decoder: Decoder,
    layer: Layer,
    number: int,
    states: Tensor,
    rotations: Tensor,
    cache: RaggedCache,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [rows, fed, heads, size], and all visible keys and values."""
    (rows, fed), size = cache.positions.shape, decoder.head_size
    heads, key_value_heads = decoder.heads, decoder.key_value_heads
    normed = rms_norm(states, states.shape[-1:], layer.attention_norm, decoder.epsilon)
    bias, weight = layer.query_key_value_bias, layer.query_key_value
    mixed = torch.mm(normed, weight) if bias is None else torch.addmm(bias, normed, weight)
    mixed = mixed.view(rows, fed, heads + 2 * key_value_heads, size)
    # rotary position embedding (arXiv 2104.09864, equation 13)
    rotated = torch.view_as_complex(mixed.unflatten(-1, (-1, 2)))[:, :, : heads + key_value_heads]
    rotated *= rotations  # in place, in ``mixed``
    return mixed[:, :, :heads], *cache.write(mixed[:, :, heads:].transpose(1, 2), number)


def _mix(
    decoder: Decoder,
    layer: Layer,
    states: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
) -> Tensor:
    """Return the states [rows * fed, hidden] after attention and the feed-forward layer."""
    rows, fed, heads, size = query.shape
    # query heads that share a key-value head are treated as further positions
    query = query.transpose(1, 2).reshape(rows, decoder.key_value_heads, -1, size)
    seen = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    seen = seen.reshape(rows, heads, fed, size).transpose(1, 2).reshape(rows * fed, heads * size)
    states = torch.addmm(states, seen, layer.output)
    normed = rms_norm(states, states.shape[-1:], layer.feed_forward_norm, decoder.epsilon)
    gate, up = torch.mm(normed, layer.gate_up).chunk(2, -1)
    return torch.addmm(states, silu(gate).mul_(up), layer.down)

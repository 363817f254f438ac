"""The layers of a small Qwen2 or Llama over a ragged cache, in as few operations as there can be.

For a policy of a few million weights on a CPU, half of a decoding step goes into calling modules.
This pass gives the same numbers as the library's, with one multiplication for query, key and value
and one for both halves of the feed-forward layer. Larger policies do not notice, and other
architectures differ: they take the library's own pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from tasks.engines.ragged import Network, RaggedCache

ARCHITECTURES = ("Qwen2ForCausalLM", "LlamaForCausalLM")
LARGEST = 50_000_000  # weights, which are copied once a session


@dataclass(frozen=True)
class Layer:
    """The weights of one layer; those that read the same input stand one below the other."""

    attention_norm: Tensor
    query_key_value: Tensor
    query_key_value_bias: Tensor | None
    output: Tensor
    feed_forward_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Decoder:
    """A policy's layers as they are now; made anew for each session."""

    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Tensor  # [vocabulary, hidden]
    epsilon: float
    heads: int
    key_value_heads: int
    cosines: Tensor  # [positions, 1, size]
    sines: Tensor


def network(decoder: Decoder) -> Network:
    """The pass as a session uses it."""
    return Network(
        layers=len(decoder.layers),
        key_value_heads=decoder.key_value_heads,
        head_size=decoder.cosines.shape[-1],
        like=decoder.embedding,
        hidden_states=partial(hidden_states, decoder),
        head=partial(linear, weight=decoder.head),
    )


def decodes(model: Any) -> bool:
    """Whether the pass serves this model, or it is better left to the library's own."""
    on_cpu = model.device.type == "cpu"
    return on_cpu and _fits(model) and model.num_parameters() <= LARGEST


@torch.inference_mode()
def decoder(model: Any, context: int) -> Decoder:
    """The weights as they are now, for ``context`` positions."""
    config, weight = model.config, model.get_input_embeddings().weight
    base = model.base_model
    cosines, sines = base.rotary_emb(weight, torch.arange(context)[None])
    return Decoder(
        embedding=weight,
        layers=[_layer(layer) for layer in base.layers],
        norm=base.norm.weight,
        head=model.get_output_embeddings().weight,
        epsilon=config.rms_norm_eps,
        heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        cosines=cosines[0][:, None],
        sines=sines[0][:, None],
    )


def _fits(model: Any) -> bool:
    """Whether the layers are what ``hidden_states`` computes."""
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


def _layer(layer: Any) -> Layer:
    attention, feed_forward = layer.self_attn, layer.mlp
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = [part.bias for part in parts if part.bias is not None]
    return Layer(
        attention_norm=layer.input_layernorm.weight,
        query_key_value=torch.cat([part.weight for part in parts]),
        query_key_value_bias=torch.cat(biases) if biases else None,
        output=attention.o_proj.weight,
        feed_forward_norm=layer.post_attention_layernorm.weight,
        gate_up=torch.cat([feed_forward.gate_proj.weight, feed_forward.up_proj.weight]),
        down=feed_forward.down_proj.weight,
    )


def hidden_states(decoder: Decoder, tokens: Tensor, cache: RaggedCache) -> Tensor:
    """Hidden states [rows, fed, hidden] of tokens [rows, fed] at ``cache.positions``."""
    shared = decoder.heads // decoder.key_value_heads
    mask = torch.arange(cache.visible) <= cache.positions[:, None, :, None]
    mask = mask if tokens.shape[1] == 1 else mask.repeat(1, 1, shared, 1)
    turns = (decoder.cosines[cache.positions], decoder.sines[cache.positions])
    states = embedding(tokens, decoder.embedding)
    for number, layer in enumerate(decoder.layers):
        normed = rms_norm(states, states.shape[-1:], layer.attention_norm, decoder.epsilon)
        states = states + _attend(decoder, layer, number, normed, turns, mask, cache)
        normed = rms_norm(states, states.shape[-1:], layer.feed_forward_norm, decoder.epsilon)
        gate, up = linear(normed, layer.gate_up).chunk(2, -1)
        states = states + linear(silu(gate) * up, layer.down)
    return rms_norm(states, states.shape[-1:], decoder.norm, decoder.epsilon)


def _attend(
    decoder: Decoder,
    layer: Layer,
    number: int,
    states: Tensor,
    turns: tuple[Tensor, Tensor],
    mask: Tensor,
    cache: RaggedCache,
) -> Tensor:
    rows, fed, _ = states.shape
    heads, key_value_heads = decoder.heads, decoder.key_value_heads
    mixed = linear(states, layer.query_key_value, layer.query_key_value_bias)
    mixed = mixed.view(rows, fed, heads + 2 * key_value_heads, -1)
    turned = _turn(mixed[:, :, : heads + key_value_heads], *turns)
    # query heads that share a key-value head stand in line as further positions
    query = turned[:, :, :heads].transpose(1, 2).reshape(rows, key_value_heads, -1, mixed.shape[-1])
    key, value = cache.update(
        turned[:, :, heads:].transpose(1, 2),
        mixed[:, :, heads + key_value_heads :].transpose(1, 2),
        number,
    )
    seen = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    seen = seen.reshape(rows, heads, fed, -1).transpose(1, 2)
    return linear(seen.reshape(rows, fed, -1), layer.output)


def _turn(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864, section 3.4.2), halves as transformers does."""
    first, second = states.chunk(2, -1)
    return states * cosines + torch.cat((-second, first), -1) * sines

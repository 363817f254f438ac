"""What transformers' own caches hold of contexts: taken apart by rows, stacked, and cut.

A cache is a list of layers with tensors [rows, ...]. Those of attention have a position in their
last dimension but one, or the last positions where the layer has a window; rows of different
lengths are stacked with zeros on the left, which a mask hides. Those of recurrent layers and of
convolutions have no positions: they are the state after the last token.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tasks.policy.lean_transformers import transformers

cache_utils = transformers.cache_utils
# Layers whose tensors are known here; a layer of another class may hold anything.
KNOWN = (
    cache_utils.DynamicLayer,
    cache_utils.DynamicSlidingWindowLayer,
    cache_utils.DynamicIndexedLayer,
    cache_utils.LinearAttentionLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
)
CACHES = ("DynamicCache", "MiniMaxCache")
ATTRIBUTES = {  # of caches and of their layers; a model may add others to them
    "linear_cache",  # of MiniMax's cache: states by layer, [] in layers of attention
    *("layers", "layer_class_to_replicate", "offloading"),
    *("keys", "values", "is_initialized", "dtype", "device"),
    *("sliding_window", "_sliding_window_tensor", "cumulative_length", "record_past"),
    *("indexer_keys", "is_indexer_initialized", "indexer_dtype", "indexer_device"),
    *("number_of_states", "conv_states", "recurrent_states", "conv_kernel_size"),
    *("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"),
}
OF_POSITIONS = ("keys", "values", "indexer_keys")
OF_THE_LAST = ("conv_states", "recurrent_states")  # number -> state
OF_THE_CACHE = "linear_cache"
Place = tuple[int, str, int]  # layer, attribute, number of the state


@dataclass(frozen=True)
class Carried:
    """What a cache holds of one or several contexts."""

    form: Any  # a cache of the same layers, whose tensors do not matter
    tensors: dict[Place, Tensor]  # [rows, ...]
    length: int  # of the longest context


def is_known(cache: Any) -> bool:
    """Return whether a cache can be taken apart."""
    return (
        isinstance(cache, transformers.DynamicCache)
        and type(cache).__name__ in CACHES
        and all(type(layer) in KNOWN for layer in cache.layers)
        and all(ATTRIBUTES.issuperset(vars(part)) for part in (cache, *cache.layers))
    )


def can_be_cut(cache: Any) -> bool:
    """Return whether a known cache holds every position: then a beginning of it is enough."""
    whole = (cache_utils.DynamicLayer, cache_utils.DynamicIndexedLayer)
    return all(type(layer) in whole for layer in cache.layers) and not _states(cache)


def can_be_padded(cache: Any) -> bool:
    """Return whether rows of different lengths of a known cache can go together.

    The choice of tokens of sparse attention (DeepSeek 3.2) goes wrong behind padding.
    """
    return not any(type(layer) is cache_utils.DynamicIndexedLayer for layer in cache.layers)


def has_positions(cache: Any) -> bool:
    """Return whether a known cache holds positions, which masks can hide."""
    return any(name in OF_POSITIONS for _, name, _ in _tensors(cache))


def state_of(cache: Any, length: int) -> Carried:
    """Return what a known cache holds after ``length`` tokens of its longest context."""
    return Carried(cache, _tensors(cache), length)


def cache_of(state: Carried) -> Any:
    """Return a cache that goes on from a state, and may write into its recurrent tensors."""
    cache = copy.copy(state.form)
    cache.layers = [copy.copy(layer) for layer in cache.layers]
    if _states(cache):
        cache.linear_cache = list(cache.linear_cache)
        for number in _states(cache):  # in a layer of no length, by which no mask is measured
            cache.layers[number : number + 1] = [cache_utils.LinearAttentionLayer()]
    for layer in cache.layers:
        for name in OF_THE_LAST:
            if hasattr(layer, name):
                setattr(layer, name, {**getattr(layer, name)})
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = state.length
    for (number, name, index), tensor in state.tensors.items():
        if name in OF_POSITIONS:
            setattr(cache.layers[number], name, tensor)
        elif name == OF_THE_CACHE:
            cache.linear_cache[number] = tensor
        else:
            getattr(cache.layers[number], name)[index] = tensor
    return cache


def stacked(states: Sequence[Carried]) -> Carried:
    """Return several states in one, row below row, in memory of its own."""
    longest = max(states, key=lambda state: state.length)
    tensors = {
        place: torch.cat([_wider(state.tensors[place], tensor, place) for state in states])
        for place, tensor in longest.tensors.items()
    }
    return Carried(longest.form, tensors, longest.length)


def row_of(state: Carried, row: int, length: int) -> Carried:
    """Return a row of a state, whose context has ``length`` tokens, in memory of its own."""
    tensors = {
        place: _narrower(tensor[row : row + 1], place, length).clone()
        for place, tensor in state.tensors.items()
    }
    return Carried(state.form, tensors, length)


def rows_of(state: Carried, rows: Tensor) -> Carried:
    """Return some rows of a state, in memory of their own."""
    tensors = {place: tensor[rows] for place, tensor in state.tensors.items()}
    return Carried(state.form, tensors, state.length)


def cut(state: Carried, length: int) -> Carried:
    """Return the first ``length`` tokens of one row of a cache that can be cut, without a copy."""
    tensors = {place: tensor[..., :length, :] for place, tensor in state.tensors.items()}
    return Carried(state.form, tensors, length)


def shared(early: Carried, late: Carried) -> Carried:
    """Return ``early``, a beginning of ``late``, with the tensors of the later one where it can."""
    layers = late.form.layers
    tensors = {
        place: late.tensors[place][..., : early.length, :]
        if place[1] in OF_POSITIONS and not layers[place[0]].is_sliding
        else tensor
        for place, tensor in early.tensors.items()
    }
    return Carried(early.form, tensors, early.length)


def _states(cache: Any) -> dict[int, Tensor]:
    """Return the states that a cache holds itself, by layer."""
    held = enumerate(getattr(cache, OF_THE_CACHE, ()))
    return {number: state for number, state in held if isinstance(state, Tensor)}


def _tensors(cache: Any) -> dict[Place, Tensor]:
    found = {(number, OF_THE_CACHE, 0): state for number, state in _states(cache).items()}
    for number, layer in enumerate(cache.layers):
        for name in OF_POSITIONS:
            tensor = getattr(layer, name, None)
            if tensor is not None and tensor.numel():
                found[number, name, 0] = tensor
        for name in OF_THE_LAST:
            for index, tensor in getattr(layer, name, {}).items():
                if tensor is not None:
                    found[number, name, index] = tensor
    return found


def _wider(tensor: Tensor, widest: Tensor, place: Place) -> Tensor:
    """Return a tensor with as many positions as another has, zeros in front."""
    missing = widest.shape[-2] - tensor.shape[-2] if place[1] in OF_POSITIONS else 0
    return pad(tensor, (0, 0, missing, 0)) if missing else tensor


def _narrower(tensor: Tensor, place: Place, length: int) -> Tensor:
    """Return a tensor without positions in front of the last ``length``."""
    return tensor[..., -length:, :] if place[1] in OF_POSITIONS else tensor

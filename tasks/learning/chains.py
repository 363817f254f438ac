"""Cut the prefix trees of a forest into chains, for layers that carry a state along tokens. Pure.

A chain is a longest sequence of slots in which each is the only continuation of the one before. A
layer that carries a state computes the chains of a forest in waves by depth, the number of
branchings before a chain: every chain of a wave begins with the state at the end of its parent
chain. So the number of waves is the depth of the trees in branchings, not in tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

PADDING = 1.1  # how much padding may enlarge a batch of chains
CHAIN_TOKENS = 128  # tokens of padding that are cheaper than one more pass


class Chains(NamedTuple):
    """N chains of a wave with up to T slots each, which go through a layer together.

    Padding is at the end of a row, and repeats its last slot.
    """

    slots: Ints  # [N, T]
    mask: NDArray[np.bool_]  # [N, T]
    parents: Ints  # [N] index among all chains of the wave before; 0 in the first wave
    lengths: Ints  # [N]


Wave = list[Chains]


def cut_into_waves(parents: Ints) -> list[Wave]:
    """Return the chains of slots, wave by wave; ``parents`` [U]: the slot before, -1 without one.

    Slots are in depth-first order. Chains of a wave are batched by similar length, in the order in
    which ``Chains.parents`` of the next wave counts them.
    """
    bounds = np.flatnonzero(np.append(_starts(parents), True))
    before = parents[bounds[:-1]]
    chain_of = np.repeat(np.arange(len(before)), np.diff(bounds))
    depths: Ints = np.zeros(len(before), np.int64)
    for chain, slot in enumerate(before):
        depths[chain] = depths[chain_of[slot]] + 1 if slot >= 0 else 0
    waves: list[Wave] = []
    indices: Ints = np.zeros(len(before), np.int64)  # chain -> index in its wave
    for depth in range(depths.max(initial=-1) + 1):
        of_wave = np.flatnonzero(depths == depth)
        lengths = bounds[of_wave + 1] - bounds[of_wave]
        order = of_wave[np.argsort(lengths, kind="stable")]
        indices[order] = np.arange(len(order))
        batches = _by_length(order, np.diff(bounds))
        waves.append([_chains(batch, bounds, before, chain_of, indices) for batch in batches])
    return waves


def _starts(parents: Ints) -> NDArray[np.bool_]:
    """Return which slots begin a chain: after a branching, or at the first token of a context."""
    children = np.bincount(parents[parents >= 0], minlength=len(parents))
    follows = parents == np.arange(-1, len(parents) - 1)
    return ~follows | (parents < 0) | (children[parents] > 1)


def _by_length(order: Ints, lengths: Ints) -> list[Ints]:
    """Divide chains, sorted by length, so that padding each to the longest of its batch is cheap.

    ``lengths``: of all chains.
    """
    ends, first, real = [], 0, 0
    for index, chain in enumerate(order):
        length = int(lengths[chain])
        most = max(PADDING * (real + length), real + length + CHAIN_TOKENS)
        if (index - first + 1) * length > most:
            ends.append(index)
            first, real = index, 0
        real += length
    return np.split(order, ends)


def _chains(batch: Ints, bounds: Ints, before: Ints, chain_of: Ints, indices: Ints) -> Chains:
    lengths = bounds[batch + 1] - bounds[batch]
    steps = np.arange(lengths.max())
    mask = steps < lengths[:, None]
    slots = bounds[batch][:, None] + np.minimum(steps, lengths[:, None] - 1)
    parents = np.where(before[batch] >= 0, indices[chain_of[before[batch]]], 0)
    return Chains(slots, mask, parents, lengths)


class Windows(NamedTuple):
    """F places in which every slot follows the slots before it in its context, k - 1 of them.

    A convolution of width k over these gives a slot what it gives it in its context.
    """

    slots: Ints  # [F] slot of each place
    missing: NDArray[np.bool_]  # [F] places before the first token of a context
    places: Ints  # [U] where each slot follows those before it


def windows(parents: Ints, width: int) -> Windows:
    """Return the places of a convolution of ``width`` tokens; ``parents`` [U] as above.

    Slots that follow each other share their places; the first after a branching, and the first of
    a context, have copies of those before them in front.
    """
    count = len(parents)
    breaks = np.flatnonzero(parents != np.arange(-1, count - 1)) if count else np.zeros(0, int)
    breaks = np.union1d(breaks, np.arange(min(count, 1)))
    known = np.append(parents, -1)  # -1 stands for no slot, and is its own parent
    copies: Ints = np.zeros((len(breaks), width - 1), np.int64)
    at = parents[breaks]
    for column in reversed(range(width - 1)):
        copies[:, column] = at
        at = known[at]
    before = (width - 1) * np.cumsum(np.isin(np.arange(count), breaks))
    places = np.arange(count) + before
    slots: Ints = np.zeros(count + copies.size, np.int64)
    slots[places] = np.arange(count)
    slots[np.setdiff1d(np.arange(len(slots)), places)] = copies.ravel()
    return Windows(np.maximum(slots, 0), slots < 0, places)

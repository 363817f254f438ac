"""Divide the trees of a batch among lanes, or among the processes that learn together.

Gathering weights and adding up gradients takes all processes, so all make the same number of
passes. One that has no trees left passes a spare forest, which counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from tasks.learning.packing import (
    Batch,
    Cost,
    Flags,
    Forest,
    Ints,
    Layout,
    forest,
    forests,
    lay_out,
)
from tasks.policy import world


def forests_in_step(batch: Batch, tokens: int, cost: Cost, device: str) -> Iterator[Forest]:
    """Yield the forests of this process's share of a batch, and as many spare ones as it takes.

    ``batch`` is equal in all processes, and has only trees with leaves. Every process must take all
    forests.
    """
    own = divided(batch, world.size(), cost)[world.rank()]
    own_forests = forests(own, tokens, cost, device)
    following = next(own_forests, None)
    while world.some(following is not None):
        yield following or spare(batch, device)
        following = next(own_forests, None)


def divided(batch: Batch, count: int, cost: Cost) -> list[Batch]:
    """Divide a batch into ``count`` parts of whole trees, of similar numbers of computed tokens.

    A token that trees of a part share is computed once there. Of two divisions, the one whose
    largest part is smaller: each tree, the largest first, to the part that is then the smallest; or
    parts of neighbours in the order of prompts, which share the longest prefixes.
    """
    if count == 1 or not batch:
        return [list(batch), *([] for _ in range(count - 1))]
    layout = lay_out(batch)
    slots = [tree.slots for tree in layout.trees]
    order = sorted(range(len(batch)), key=lambda index: layout.trees[index].first)
    ways = (_balanced(layout, slots, count, cost), _in_runs(layout, slots, order, count, cost))
    parts, _ = min(ways, key=lambda way: max(way[1]))
    return [[batch[index] for index in sorted(part)] for part in parts]


Division = tuple[list[list[int]], list[int]]  # part -> places of trees, and its computed tokens


def _balanced(layout: Layout, slots: Sequence[Ints], count: int, cost: Cost) -> Division:
    """Give each tree, the largest first, to the part that is the smallest with it."""
    none = np.zeros(len(layout.tokens), bool)
    taken: list[Flags] = [none] * count
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    sizes = [cost.with_more(layout, none, some)[1] for some in slots]
    for index in sorted(range(len(slots)), key=lambda index: (-sizes[index], index)):
        with_it = [cost.with_more(layout, some, slots[index]) for some in taken]
        least = min(range(count), key=lambda part: with_it[part][1])
        taken[least], loads[least] = with_it[least]
        parts[least].append(index)
    return parts, loads


def _in_runs(
    layout: Layout, slots: Sequence[Ints], order: Sequence[int], count: int, cost: Cost
) -> Division:
    """Cut trees, in an order, into runs by the tokens that each adds to those before it."""
    taken = np.zeros(len(layout.tokens), bool)
    ends = [0]
    for index in order:
        taken, end = cost.with_more(layout, taken, slots[index])
        ends.append(end)
    parts: list[list[int]] = [[] for _ in range(count)]
    for place, index in enumerate(order):
        middle = (ends[place] + ends[place + 1]) / 2
        parts[min(count - 1, int(middle * count / ends[-1]))].append(index)
    loads = []
    for part in parts:
        own = np.zeros(len(layout.tokens), bool)
        for index in part:
            own[slots[index]] = True
        loads.append(cost.tokens(layout, own))
    return parts, loads


def spare(batch: Batch, device: str) -> Forest:
    """Return a forest that counts for nothing: the shortest leaf of a batch."""
    (credited, leaf) = min(
        ((credited, leaf) for credited, leaves in batch for leaf in leaves),
        key=lambda entry: len(entry[0].credits[entry[1]].advantages),
    )
    return replace(forest(lay_out([(credited, [leaf])]), device), spare=True)

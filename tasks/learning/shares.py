"""Deal the trees of a batch to the processes that learn together, and keep these in step.

Gathering weights and adding up gradients takes all processes, so all make the same number of
passes. One that has no trees left passes a spare forest, which counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tasks.learning.packing import Cost, Credited, Forest, forest, forests, lay_out
from tasks.policy import world
from tasks.policy.parallel import balanced_parts

Batch = Sequence[tuple[Credited, Sequence[int]]]  # trees, with indices of their leaves


def forests_in_step(batch: Batch, tokens: int, cost: Cost, device: str) -> Iterator[Forest]:
    """Yield the forests of this process's share of a batch, and as many spare ones as it takes.

    ``batch`` is equal in all processes, and has only trees with leaves. Every process must take all
    forests.
    """
    own_forests = forests(share(batch, cost), tokens, cost, device)
    following = next(own_forests, None)
    while world.some(following is not None):
        yield following or spare(batch, device)
        following = next(own_forests, None)


def share(batch: Batch, cost: Cost) -> list[tuple[Credited, Sequence[int]]]:
    """Return this process's part of a batch: whole trees.

    Parts are of a similar number of tokens that are computed.
    """
    parts = balanced_parts(computed_tokens(batch, cost), world.size())
    return [batch[index] for index in parts[world.rank()]]


def computed_tokens(batch: Batch, cost: Cost) -> list[int]:
    """Count the tokens that are computed for each tree; each process counts a part of them."""
    indices = range(world.rank(), len(batch), world.size())
    counts = {index: cost.tokens([lay_out(*batch[index])]) for index in indices}
    every = {index: count for counted in world.gathered(counts) for index, count in counted.items()}
    return [every[index] for index in range(len(batch))]


def spare(batch: Batch, device: str) -> Forest:
    """Return a forest that counts for nothing: the shortest leaf of a batch."""
    (credited, leaf) = min(
        ((credited, leaf) for credited, leaves in batch for leaf in leaves),
        key=lambda entry: len(entry[0].credits[entry[1]].advantages),
    )
    return replace(forest([lay_out(credited, [leaf])], device), spare=True)

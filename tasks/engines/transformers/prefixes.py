"""Beginnings that contexts share: which of them are computed once, and copied. Pure.

Prompts of different questions often begin alike, with a system prompt or examples. Contexts form a
trie: at each of its branches, those that go on alike are a set, of which one is computed up to
where they part, and the others take a copy. A copy is cheap; a pass over few tokens is not, since
it reads all weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasks.trees.tree import common_length

WORTH = 256  # tokens that a level has to save: a pass costs about as much as 40 to 100 of them


@dataclass(frozen=True)
class Shared:
    """A beginning of several contexts, computed in the first of them if it is not yet."""

    leader: int
    followers: list[int]
    end: int  # tokens

    def saved(self, known: Sequence[int]) -> int:
        """Return the tokens that need no computing."""
        return sum(self.end - known[index] for index in self.followers)


def plan(
    tokens: Sequence[NDArray[np.int32]], known: Sequence[int]
) -> tuple[list[list[Shared]], list[int]]:
    """Return levels of beginnings, each level after the one before, and what is known after all.

    ``known``: how many tokens of each context are computed. The last token of a context is left
    out, because it is computed for its logits.
    """
    levels: list[list[Shared]] = []
    known = list(known)
    alike = [list(range(len(tokens)))]
    while alike := [indices for indices in alike if len(indices) > 1]:
        common = [common_to([tokens[index] for index in indices]) for indices in alike]
        level = [
            shared
            for indices, length in zip(alike, common, strict=True)
            if (shared := _shared(indices, min(length, _room(tokens, indices)), known))
        ]
        if sum(shared.saved(known) for shared in level) >= WORTH:
            levels.append(level)
            for shared in level:
                for index in (shared.leader, *shared.followers):
                    known[index] = max(known[index], shared.end)
        alike = [
            part
            for indices, length in zip(alike, common, strict=True)
            for part in _parts(tokens, indices, length)
        ]
    return levels, known


def common_to(tokens: Sequence[NDArray[np.int32]]) -> int:
    """Return how many tokens all contexts begin with."""
    length = len(tokens[0])
    for other in tokens[1:]:
        length = common_length(tokens[0][:length], other)
    return length


def _room(tokens: Sequence[NDArray[np.int32]], indices: Sequence[int]) -> int:
    return min(len(tokens[index]) for index in indices) - 1


def _shared(indices: Sequence[int], end: int, known: Sequence[int]) -> Shared | None:
    """Return the beginning that contexts share; None where all of them have it."""
    leader = max(indices, key=lambda index: known[index])
    followers = [index for index in indices if known[index] < end and index != leader]
    return Shared(leader, followers, end) if followers else None


def _parts(
    tokens: Sequence[NDArray[np.int32]], indices: Sequence[int], length: int
) -> list[list[int]]:
    """Divide contexts by their token behind a common beginning; leave out those that end there."""
    parts: dict[int, list[int]] = {}
    for index in indices:
        if len(tokens[index]) > length:
            parts.setdefault(int(tokens[index][length]), []).append(index)
    return list(parts.values())

"""Work side by side on the cores of a CPU: lanes of Python, each with its share of torch's threads.

Small kernels lose more by waiting for a second thread than they gain from it, while whole pieces of
work (some questions, some trees) do not wait for each other at all. The kernels of an update are
long and run outside Python's lock; those of a decoding step are not, so there a lane beyond the
first runs in a process of its own (engines/worker.py). What a lane computes depends on its piece
alone, so equal runs stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

MOST = 4  # lanes: beyond, Python's lock is what they wait for

Piece = TypeVar("Piece")
Result = TypeVar("Result")


def lanes(device: str, pieces: int) -> int:
    """How many lanes a piece of work is cut into: one on a GPU, else as many as threads allow."""
    return 1 if device != "cpu" else max(1, min(MOST, torch.get_num_threads(), pieces))


def side_by_side(work: Callable[[Piece], Result], pieces: Sequence[Piece]) -> list[Result]:
    """``work`` of every piece, each in a lane of its own; results in the order of the pieces.

    A single piece is done here, with all threads.
    """
    if len(pieces) < 2:
        return [work(piece) for piece in pieces]
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // len(pieces)))  # new threads begin with this number
    try:
        with ThreadPoolExecutor(len(pieces), thread_name_prefix="lane") as pool:
            return list(pool.map(work, pieces))
    finally:
        torch.set_num_threads(threads)


def balanced_parts(sizes: Sequence[int], hands: int) -> list[list[int]]:
    """Which items go to each hand, so that sizes add up alike: the largest first, to the least."""
    given: list[list[int]] = [[] for _ in range(hands)]
    load = [0] * hands
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        least = load.index(min(load))
        given[least].append(item)
        load[least] += sizes[item]
    return [sorted(items) for items in given]

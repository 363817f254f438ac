"""Run pieces of work in parallel threads ("lanes") that split torch's thread pool.

A second thread inside a small kernel costs more than it gains, while whole pieces of work (some
questions, some trees) do not wait for each other. The kernels of an update are long and release
Python's lock, so its lanes are threads; those of a decoding step are short, so its lanes beyond the
first are processes (tasks/engines/transformers/sampling_worker.py). The result of a lane
depends on its piece alone, so equal runs stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

MOST = 4  # lanes; more would wait for Python's lock

Piece = TypeVar("Piece")
Result = TypeVar("Result")


def lanes(device: str, pieces: int) -> int:
    """Return the number of lanes: 1 on a GPU, else at most MOST, torch's threads and ``pieces``."""
    return 1 if device != "cpu" else max(1, min(MOST, torch.get_num_threads(), pieces))


def side_by_side(work: Callable[[Piece], Result], pieces: Sequence[Piece]) -> list[Result]:
    """Apply ``work`` to every piece, each in its own lane; return results in order.

    A single piece runs in the calling thread with all of torch's threads. Others may be at work at
    the same time (reinforce.ahead), so a lane does not inherit its number of threads: it sets it.
    """
    if len(pieces) < 2:
        return [work(piece) for piece in pieces]
    threads = torch.get_num_threads()
    try:
        with with_threads(max(1, threads // len(pieces)), len(pieces), "lane") as pool:
            return list(pool.map(work, pieces))
    finally:
        torch.set_num_threads(threads)  # that threads begun later inherit


def with_threads(threads: int, workers: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose workers compute with so many of torch's threads each."""
    return ThreadPoolExecutor(workers, name, _set_threads, (threads,))


def _set_threads(threads: int) -> None:
    torch.get_num_threads()  # at its first use by a thread, torch takes the number set last by any
    torch.set_num_threads(threads)

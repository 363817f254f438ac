"""The processes that learn together: which one this is, and what they exchange. Torch only.

A process that has joined no others is a world of its own: it has rank 0 of 1, and sends nothing.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as distributed

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # by device
PATIENCE = timedelta(minutes=30)  # that one process waits for the others within an operation

Value = TypeVar("Value")


def join(device: str) -> None:
    """Join the processes that torchrun has started with this one; on GPUs, take one of them."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(BACKENDS[device], timeout=PATIENCE)


def size() -> int:
    """Return the number of processes that learn together."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def rank() -> int:
    """Return the number of this process among them, from 0."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def gathered(value: Value) -> list[Value]:
    """Return the values of all processes, by rank. Every process must call this."""
    if size() == 1:
        return [value]
    values: list[Value | None] = [None] * size()
    distributed.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def some(flag: bool) -> bool:
    """Return whether the flag of some process is set. Every process must call this."""
    if size() == 1:
        return flag
    highest = torch.tensor(int(flag))
    distributed.all_reduce(highest, distributed.ReduceOp.MAX)
    return bool(highest)

"""From trees to micro-batches of bounded size: one padded row a leaf. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.trajectory import TURN, Node


@dataclass(frozen=True)
class Row:
    """One leaf as the learner sees it; all arrays are [T], prompt included."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]  # sampled tokens
    old_logprobs: NDArray[np.float32]  # of the policy that sampled; 0 at observed tokens
    advantage: float

    @property
    def sampled(self) -> int:
        return int(self.mask.sum())


@dataclass(frozen=True)
class MicroBatch:
    """Padded rows [leaves, T]; the padding lies behind each row and is masked."""

    tokens: Tensor
    mask: Tensor
    old_logprobs: Tensor
    advantages: Tensor


def row(trajectory: Sequence[Node], advantage: float) -> Row:
    """Lay the nodes of one trajectory end to end."""
    return Row(
        tokens=np.concatenate([node.tokens for node in trajectory]),
        mask=np.concatenate([np.full(len(node.tokens), node.kind == TURN) for node in trajectory]),
        old_logprobs=np.concatenate(
            [
                node.logprobs if node.kind == TURN else np.zeros(len(node.tokens), np.float32)
                for node in trajectory
            ]
        ),
        advantage=advantage,
    )


def micro_batches(rows: Sequence[Row], tokens: int, device: str) -> list[MicroBatch]:
    """Rows of similar length side by side, at most ``tokens`` padded positions a batch.

    A single row longer than that gets a batch of its own.
    """
    batches: list[list[Row]] = []
    for item in sorted(rows, key=lambda row: len(row.tokens)):
        if not batches or (len(batches[-1]) + 1) * len(item.tokens) > tokens:
            batches.append([])
        batches[-1].append(item)
    return [_pad(batch, device) for batch in batches]


def _pad(rows: Sequence[Row], device: str) -> MicroBatch:
    shape = (len(rows), max(len(item.tokens) for item in rows))
    tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    old_logprobs = np.zeros(shape, np.float32)
    for i, item in enumerate(rows):
        length = len(item.tokens)
        tokens[i, :length] = item.tokens
        mask[i, :length] = item.mask
        old_logprobs[i, :length] = item.old_logprobs
    advantages = np.array([item.advantage for item in rows], np.float32)[:, None]
    return MicroBatch(
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(mask).to(device),
        torch.from_numpy(old_logprobs).to(device),
        torch.from_numpy(np.broadcast_to(advantages, shape).copy()).to(device),
    )

"""A turn as vLLM is asked for it, and what it says: the same here and through a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORKER = "tasks.engines.vllm.worker.PolicyWorker"  # that vLLM mixes into its own
Drawn = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]
Opener = tuple[Callable[..., Tensor], tuple[Any, ...]]  # of a weight that another process holds
ALIGNMENT = 64  # bytes, as torch's own allocator's
MEASURED = 2  # logprobs a token: its own, and the entropy (see ``MeasuringSampler``)
SEEDS = 2**63  # vLLM keeps seeds in a signed number


@dataclass(frozen=True)
class Fault:
    """What vLLM has died of."""

    reason: str


@dataclass(frozen=True)
class Turn:
    """One turn to sample."""

    tokens: NDArray[np.int32]  # [context]
    seed: int
    max_tokens: int
    temperature: float
    top_p: float
    stop_tokens: tuple[int, ...]  # ids after which a turn is over: the end token among them
    stop_texts: tuple[str, ...]  # texts after which it is; empty where tokens say it

    def options(self) -> dict[str, Any]:
        """Arguments of vLLM's SamplingParams."""
        return {
            "seed": self.seed % SEEDS,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop_token_ids": list(self.stop_tokens),
            "stop": list(self.stop_texts),
            "detokenize": bool(self.stop_texts),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "logprobs": MEASURED,
            "flat_logprobs": True,
        }


def drawn(output: Any) -> Drawn:
    """Tokens, logprobs and entropies [T] of one finished output of vLLM."""
    tokens = np.array(output.token_ids, np.int32)
    pairs = np.array(output.logprobs.logprobs, np.float32).reshape(-1, MEASURED)[: len(tokens)]
    return tokens, pairs[:, 0].copy(), pairs[:, 1].copy()


def mapped(file: str, size: int, first: int, kind: torch.dtype, shape: torch.Size) -> Tensor:
    """A tensor that begins at byte ``first`` of a file of ``size`` bytes, which is mapped."""
    memory = torch.from_file(file, shared=True, size=size, dtype=torch.uint8)
    return memory[first : first + shape.numel() * kind.itemsize].view(kind).view(shape)

"""Messages between the trainer and vLLM: turns to sample, sampled turns, weights to open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORKER_CLASS = "tasks.engines.vllm.worker.PolicyWorker"  # vLLM mixes it into its own worker
# tokens, logprobs and entropies [T] of a turn
Drawn = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]
Opener = tuple[
    Callable[..., Tensor], tuple[Any, ...]
]  # opens a weight in another process's memory: function and arguments
ALIGNMENT = 64  # bytes, as torch's own allocator's
MEASURED = 2  # logprobs a token: its own, and the entropy (see ``MeasuringSampler``)
SEEDS = 2**63  # vLLM keeps seeds in a signed number


@dataclass(frozen=True)
class Fault:
    """The reason why vLLM has failed."""

    reason: str


@dataclass(frozen=True)
class Turn:
    """One turn to sample, as vLLM gets it."""

    tokens: NDArray[np.int32]  # [context]
    seed: int
    max_tokens: int
    temperature: float
    top_p: float
    stop_tokens: tuple[int, ...]  # ids that end a turn, with the end token
    stop_texts: tuple[str, ...]  # texts that end a turn; empty where tokens suffice
    tree: bytes = b""  # which tree it is of; turns of a tree share prefixes

    def options(self) -> dict[str, Any]:
        """Return arguments of vLLM's SamplingParams."""
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


def parse_output(output: Any) -> Drawn:
    """Return tokens, logprobs and entropies [T] of a finished output of vLLM."""
    tokens = np.array(output.token_ids, np.int32)
    pairs = np.array(output.logprobs.logprobs, np.float32).reshape(-1, MEASURED)[: len(tokens)]
    return tokens, pairs[:, 0].copy(), pairs[:, 1].copy()


def map_tensor(file: str, size: int, first: int, kind: torch.dtype, shape: torch.Size) -> Tensor:
    """Map a file of ``size`` bytes; return the tensor that begins at byte ``first``."""
    memory = torch.from_file(file, shared=True, size=size, dtype=torch.uint8)
    return memory[first : first + shape.numel() * kind.itemsize].view(kind).view(shape)

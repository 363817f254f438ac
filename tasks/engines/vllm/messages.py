"""Messages between the trainer and vLLM: sampled turns, and weights to open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tasks.engines.turns import Drawn
from tasks.engines.vllm_options import MEASURED

WORKER_CLASS = "tasks.engines.vllm.policy_worker.PolicyWorker"  # vLLM mixes it into its own worker
Opener = tuple[
    Callable[..., Tensor], tuple[Any, ...]
]  # opens a weight in another process's memory: function and arguments
ALIGNMENT = 64  # bytes, as torch's own allocator's
LOG = Path(".beamline/vllm.log")  # output of the process that was started last


@dataclass(frozen=True)
class EngineFault:
    """The reason why vLLM has failed."""

    reason: str


def parse_output(output: Any) -> Drawn:
    """Return tokens, logprobs and entropies [T] of a finished output of vLLM."""
    tokens = np.array(output.token_ids, np.int32)
    pairs = np.array(output.logprobs.logprobs, np.float32).reshape(-1, MEASURED)[: len(tokens)]
    return tokens, pairs[:, 0].copy(), pairs[:, 1].copy()


def map_tensor(file: str, size: int, first: int, kind: torch.dtype, shape: torch.Size) -> Tensor:
    """Map a file of ``size`` bytes; return the tensor that begins at byte ``first``."""
    memory = torch.from_file(file, shared=True, size=size, dtype=torch.uint8)
    return memory[first : first + shape.numel() * kind.itemsize].view(kind).view(shape)

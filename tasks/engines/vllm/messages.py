"""Messages between the trainer and vLLM: options of turns, sampled turns, weights to open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tasks.engines.turns import Drawn, TurnRequest

WORKER_CLASS = "tasks.engines.vllm.worker.PolicyWorker"  # vLLM mixes it into its own worker
Opener = tuple[
    Callable[..., Tensor], tuple[Any, ...]
]  # opens a weight in another process's memory: function and arguments
ALIGNMENT = 64  # bytes, as torch's own allocator's
MEASURED = 2  # logprobs a token: its own, and the entropy (see ``MeasuringSampler``)
SEEDS = 2**63  # vLLM keeps seeds in a signed number


@dataclass(frozen=True)
class EngineFault:
    """The reason why vLLM has failed."""

    reason: str


def sampling_options(turn: TurnRequest) -> dict[str, Any]:
    """Return arguments of vLLM's SamplingParams for a turn."""
    return {
        "seed": turn.seed % SEEDS,
        "max_tokens": turn.max_tokens,
        "temperature": turn.temperature,
        "top_p": turn.top_p,
        "stop_token_ids": list(turn.stop_tokens),
        "stop": list(turn.stop_texts),
        "detokenize": bool(turn.stop_texts),
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

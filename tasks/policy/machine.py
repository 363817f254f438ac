"""Set up this process for equal runs: threads, deterministic kernels, precision, allocator."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
import transformers

from params.schema.base import Machine
from tasks.policy.model import M_MMAP_THRESHOLD, M_TOP_PAD, M_TRIM_THRESHOLD

PRECISION = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of passes
KEPT_MEMORY = {M_TRIM_THRESHOLD: 2**30, M_TOP_PAD: 2**26, M_MMAP_THRESHOLD: 2**25}


def use_machine(machine: Machine) -> None:
    """Set threads, and choose deterministic kernels, so that equal runs give equal weights.

    Keeps transformers quiet: a run shows its own progress.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(machine.threads)
    torch.use_deterministic_algorithms(True, warn_only=machine.device != "cpu")
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False  # a debugging aid that costs 12 %
    _keep_memory()


def _keep_memory() -> None:
    """Tell the C library to keep freed memory for the next tensor of its size.

    To hand it back and take it anew costs a tenth of an update of a small policy. Settings of the
    user's own (MALLOC_...) win; a library without ``mallopt`` is left as it is.
    """
    own = any(name.startswith("MALLOC_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not own:
        for option, size in KEPT_MEMORY.items():
            mallopt(option, size)


def in_precision(machine: Machine) -> torch.autocast:
    """In this block a model with float32 weights computes its passes in the recipe's precision.

    Matrix products and attention are in bf16 then; sums, norms and the weights' gradients are not
    (mixed precision, arXiv 1710.03740, sections 3.1 and 3.3). It is a mode of the thread: each lane
    enters it. Weights are cast anew at each use, since the cache of cast ones belongs to all
    threads, outlives a pass without gradients, and would add gradients up in bf16.
    """
    kind = PRECISION[machine.precision]
    low = kind is not torch.float32
    return torch.autocast(machine.device, kind if low else None, enabled=low, cache_enabled=False)

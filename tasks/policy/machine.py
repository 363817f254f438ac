"""Set up this process for reproducible runs: threads, kernels, precision, allocator."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import torch

from params.schema.base import Machine
from tasks.policy.lean_transformers import transformers

PRECISION = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of forward passes
# Options of glibc's mallopt(3), in bytes: free memory kept at the top of the heap, extra memory
# taken with each request, and the size above which an allocation is a mapping of its own; and the
# number of heaps.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
LARGE = 2**25  # weights: of larger policies, a copy and kept memory are what machines lack
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # of torch: large tensors get huge pages of memory
KEPT_MEMORY = {
    M_TRIM_THRESHOLD: 2**30,
    M_TOP_PAD: 2**26,
    M_MMAP_THRESHOLD: 2**25,
    M_ARENA_MAX: 1,
}


def use_machine(machine: Machine) -> None:
    """Set the number of threads and choose deterministic kernels: equal runs give equal weights.

    Silences transformers, because a run shows its own progress.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(machine.threads)
    _use_deterministic_algorithms(warn_only=machine.device != "cpu")
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False  # a debugging aid that costs 12 %
    _keep_memory()


def _use_deterministic_algorithms(warn_only: bool) -> None:
    """Do what torch.use_deterministic_algorithms(True) does, without its import of the compiler.

    torch imports the compiler, which takes as long as torch itself, to set one value there. The
    compiler reads the same value from an environment variable when something else imports it.
    """
    if "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        return
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    torch._C._set_deterministic_algorithms(True, warn_only=warn_only)


def _keep_memory() -> None:
    """Make the C library keep freed memory for the next tensor of that size.

    Returning memory to the system and requesting it again takes a tenth of an update of a small
    policy. Environment variables MALLOC_... of the user have priority, and a C library without
    ``mallopt`` is left as it is.

    All threads share one heap: each would keep one of its own, and lanes are new threads each time
    (flows/__init__.py, for programs whose libraries start threads before).

    What is larger, as logits over a large vocabulary, is returned, and has huge pages, which the
    system hands out as fast. torch reads that variable at its first tensor.
    """
    os.environ.setdefault(HUGE_PAGES, "1")
    set_by_user = any(name.startswith("MALLOC_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not set_by_user:
        for option, size in KEPT_MEMORY.items():
            mallopt(option, size)


def return_memory() -> None:
    """Return to the system what is free of the heap, wherever it lies.

    An update of a large policy leaves free what the next one cannot use whole, since its forests
    have other sizes: training grew by a quarter from iteration to iteration.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


def in_precision(machine: Machine) -> torch.autocast:
    """Return a context in which a model with float32 weights computes in the recipe's precision.

    With bfloat16, matrix products and attention are in bf16; sums, norms and the gradients of
    weights are in float32 (mixed precision, arXiv 1710.03740, sections 3.1 and 3.3). The context
    applies to the current thread. Autocast's cache of cast weights is off: all threads share it, it
    survives a pass without gradients, and it would accumulate gradients in bf16.
    """
    kind = PRECISION[machine.precision]
    low = kind is not torch.float32
    return torch.autocast(machine.device, kind if low else None, enabled=low, cache_enabled=False)

"""Matrix products on a CPU by oneDNN, for sampling and for learning.

torch multiplies in float32 by MKL, which takes half the speed of a processor that is not Intel's.
oneDNN, which torch has as well, takes all of it. It multiplies few rows by a weight that it has
packed once two to three times as fast, in bfloat16 up to twice as fast (docs/performance.md,
"Sampling a real model on a CPU"). A packed weight is a copy, and cannot be sent to another process.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

SMALL = 4_000_000  # weights of a policy whose products are fast as they are
FEW = 32  # rows for which a weight is packed; others are multiplied nearly as fast
_PACK = "_reorder_linear_weight"
_MULTIPLY = "_linear_pointwise"


@cache
def has_onednn() -> bool:
    """Return whether this torch has oneDNN's products, and those with packed weights."""
    known = torch.ops.mkldnn
    return torch.backends.mkldnn.is_available() and all(
        hasattr(known, name) for name in (_PACK, _MULTIPLY)
    )


def packed(weight: Tensor) -> Tensor:
    """Return a weight [output, input] as oneDNN reads it fastest."""
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), FEW)
    return found


def transposed(weight: Tensor) -> Tensor:
    """Return [output, input] as [input, output]: the product of few rows is up to twice as fast."""
    return weight.t().contiguous()


def times_transposed(one: Tensor, other: Tensor) -> Tensor:
    """Multiply [rows, shared] by [columns, shared], views or not. [rows, columns]"""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(one, other, None, "none", [], "")
    return found


def product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply states [rows, input] by a weight, packed or [input, output]. [rows, output]"""
    if weight.is_mkldnn:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
        return found
    return torch.mm(states, weight) if bias is None else torch.addmm(bias, states, weight)

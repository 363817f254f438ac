"""Matrix products of few rows on a CPU, with weights laid out for them.

oneDNN multiplies by a weight that it has packed once two to three times as fast as torch's usual
products do in float32, which read it as it lies, and up to twice as fast in bfloat16; for any
number of rows (docs/performance.md, "Sampling a real model on a CPU"). A packed weight is a copy,
and cannot be sent to another process.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

FEW = 32  # rows for which a weight is packed; others are multiplied nearly as fast
_PACK = "_reorder_linear_weight"
_MULTIPLY = "_linear_pointwise"


@cache
def can_pack() -> bool:
    """Return whether this torch has oneDNN's products with packed weights."""
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


def product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply states [rows, input] by a weight, packed or [input, output]. [rows, output]"""
    if weight.is_mkldnn:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
        return found
    return torch.mm(states, weight) if bias is None else torch.addmm(bias, states, weight)

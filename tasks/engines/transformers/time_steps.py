"""Bounds of the time steps of state-space layers, for passes of a single token.

Layers of Mamba 2 (arXiv 2405.21060) keep the time step softplus(x + bias) of a head within bounds.
transformers does so where it computes several tokens, and not where it computes one: Nemotron-H and
Zamba 2 would sample from other distributions than they learn. Here x itself is bounded, which is
the same for several tokens, because softplus is monotone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor


@contextmanager
def bounded(model: Any) -> Iterator[None]:
    """Have all state-space layers of a model keep their bounds."""
    with ExitStack() as stack:
        for layer in model.modules():
            lowest, highest = getattr(layer, "time_step_limit", None) or (0.0, math.inf)
            if (lowest > 0 or highest < math.inf) and hasattr(layer, "in_proj"):
                bound = partial(_bound, layer, _before_softplus(lowest), _before_softplus(highest))
                stack.callback(layer.in_proj.register_forward_hook(bound).remove)
        yield


def _bound(layer: Any, lowest: float, highest: float, _: Any, __: Any, output: Tensor) -> Tensor:
    """Bound the last numbers of a projection [..., size], one a head: before bias and softplus."""
    bias = layer.dt_bias.to(output.dtype)
    before, steps = output.split([output.shape[-1] - len(bias), len(bias)], -1)
    return torch.cat([before, steps.clamp(lowest - bias, highest - bias)], -1)


def _before_softplus(step: float) -> float:
    """Return the x with softplus(x) = step."""
    if step <= 0:
        return -math.inf
    return step + math.log(-math.expm1(-step)) if step < math.inf else math.inf

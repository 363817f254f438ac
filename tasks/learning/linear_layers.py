"""Linear layers that learn in float32 on a CPU, with products by oneDNN. Torch only.

Two matrix products of three of a layer are in its backward pass, so learning gains what sampling
does (tasks/policy/products.py, docs/performance.md, "Learning a real model on a CPU").
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear as torch_linear

from tasks.policy.products import SMALL, has_onednn, times_transposed


@contextmanager
def by_onednn(model: Any) -> Iterator[None]:
    """Let the linear layers of a large model multiply by oneDNN inside this context."""
    with ExitStack() as stack:
        if has_onednn() and model.device.type == "cpu" and model.num_parameters() > SMALL:
            for layer in model.modules():
                if type(layer) is torch.nn.Linear and "forward" not in layer.__dict__:
                    layer.__dict__["forward"] = partial(linear, layer)
                    stack.callback(layer.__dict__.pop, "forward")
        yield


def linear(layer: torch.nn.Linear, states: Tensor) -> Tensor:
    """Return a linear layer's output [..., output] of states [..., input]."""
    kinds = {layer.weight.dtype, states.dtype}
    if kinds != {torch.float32} or torch.is_autocast_enabled("cpu"):
        return torch_linear(states, layer.weight, layer.bias)
    mixed: Tensor = _Product.apply(states.flatten(0, -2), layer.weight)
    mixed = mixed if layer.bias is None else mixed + layer.bias
    return mixed.unflatten(0, states.shape[:-1])


class _Product(torch.autograd.Function):
    """Products [rows, output] of states [rows, input] and a weight [output, input]."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight)
        return times_transposed(states, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        states, weight = ctx.saved_tensors
        of_states, of_weight = ctx.needs_input_grad
        return (
            times_transposed(gradient, weight.t()) if of_states else None,
            times_transposed(gradient.t(), states.t()) if of_weight else None,
        )

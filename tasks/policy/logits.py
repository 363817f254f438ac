"""The logits of a policy from its hidden states, as the policy's own forward pass makes them.

Some architectures scale what the last product gives (Cohere, Granite, Falcon-H1) or bound it
(Gemma 2: ``final_logit_softcapping``). So the forward pass of the whole model runs over hidden
states in place of its layers, and nothing of it is written again here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tasks.policy import token_ids


class GivenStates:
    """Stands for the layers of a model, and returns states in place of computing them."""

    def __init__(self, layers: Any, states: Tensor) -> None:
        self._layers, self._states = layers, states

    def __call__(self, *_: Any, **__: Any) -> GivenOutput:
        return GivenOutput(self._states)

    def __getattr__(self, name: str) -> Any:
        """Return a setting of the layers, and this object for a part of them (OPT's decoder)."""
        value = getattr(self._layers, name)
        return self if isinstance(value, torch.nn.Module) else value


class GivenOutput:
    """The output of a model without its head: the states of its last layer, and nothing else."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        """Return None for what models may give besides: caches, states of other layers."""
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> Tensor:
        if index:
            raise IndexError(index)
        return self.last_hidden_state


def backbone_of(model: Any) -> Any:
    """Return the layers of a policy without its head, from tokens to hidden states.

    A model without a head is its own.
    """
    return getattr(model, _backbone(model), model)


def _backbone(model: Any) -> str:
    """Return the name of a policy's layers, which is not always the one it says (Llama 4)."""
    prefix: str = model.base_model_prefix
    return prefix if hasattr(model, prefix) else "model"


def head_of(model: Any) -> Callable[[Tensor], Tensor]:
    """Return the function from hidden states [P, H] to logits [P, V] of a policy.

    V: the ids up to the last one that has a token (``token_ids``); a hole is never likely.
    """
    ids = token_ids.of(model)

    def logits(states_PH: Tensor) -> Tensor:
        # The same weights and settings in another object: threads that compute at once each have
        # their own.
        shell = object.__new__(type(model))
        given = GivenStates(backbone_of(model), states_PH[None])
        shell.__dict__ = {**model.__dict__, _backbone(model): given}
        result: Tensor = type(model).forward(shell).logits[0]
        return ids.only(result)

    return logits

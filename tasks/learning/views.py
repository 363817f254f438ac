"""What losses read: padded rows of the sampled tokens of each leaf. Torch only.

Dimensions: L leaves, S sampled tokens of the longest leaf.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
LOGPROB_FLOOR = -1e4  # replaces the log of probability 0; beyond all limits


@dataclass(frozen=True)
class Views:
    """One micro-batch of leaves; every tensor is [L, S].

    Values where ``mask`` is False (padding, observed tokens) are ignored, even NaN or inf.
    """

    logprobs: Tensor  # of the policy that learns; carries the gradient
    old_logprobs: Tensor  # of the policy that sampled, as the trainer computes them; no gradient
    advantages: Tensor
    mask: Tensor  # bool: sampled tokens
    segments: Tensor  # int64: segment of each token within its leaf, ascending from 0, below S
    sampler_logprobs: Tensor  # of the policy that sampled, as the engine computed them
    entropies: Tensor  # over ln|V|, in [0, 1]; carry a gradient where the loss has a bonus
    reference_logprobs: Tensor | None = None


def sampled_only(views: Views) -> Views:
    """Return the views with 0 where ``mask`` is False, and log-probabilities made finite."""

    def kept(values: Tensor) -> Tensor:
        return torch.where(views.mask, values, 0)

    def finite(logprobs: Tensor) -> Tensor:
        return kept(logprobs).clamp(min=LOGPROB_FLOOR)

    reference = views.reference_logprobs
    return replace(
        views,
        logprobs=finite(views.logprobs),
        old_logprobs=finite(views.old_logprobs),
        sampler_logprobs=finite(views.sampler_logprobs),
        reference_logprobs=None if reference is None else finite(reference),
        advantages=kept(views.advantages),
        segments=kept(views.segments),
        entropies=kept(views.entropies),
    )


def clamped(values: Tensor, limit: float = LOG_RATIO_LIMIT) -> Tensor:
    """Return values within +-limit."""
    return values.clamp(-limit, limit)

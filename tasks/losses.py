"""Policy losses over leaf views: padded rows [leaves, tokens] and a mask of sampled tokens. Pure.

Sums, not means: a loss is divided by a denominator that counts the leaf views of the whole
optimizer step, so micro-batches add up to exactly the gradient of the whole batch (algorithms
section 4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class Views:
    """One micro-batch of leaves; every field is [leaves, tokens], observed positions masked out."""

    logprobs: Tensor  # of the policy that learns; carries the gradient
    old_logprobs: Tensor  # of the policy that sampled
    advantages: Tensor
    mask: Tensor  # bool: sampled tokens


@dataclass(frozen=True)
class Clip:
    """Clip range of the importance ratio: [1 - low, 1 + high]."""

    low: float
    high: float


def log_ratio(views: Views) -> Tensor:
    """log pi - log pi_old, clamped to +-20; 0 at observed positions. [leaves, tokens]"""
    difference = torch.where(views.mask, views.logprobs - views.old_logprobs, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def token_ratio(views: Views) -> Tensor:
    """One importance ratio a token (PPO, arXiv 1707.06347, equation 6). [leaves, tokens]"""
    return log_ratio(views).exp()


def clipped_objective(ratio: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """-min(rho A, clip(rho) A), element by element (PPO, equation 7)."""
    clipped = ratio.clamp(1 - clip.low, 1 + clip.high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def sequence_mean(loss: Tensor, mask: Tensor) -> Tensor:
    """Sum over leaves of the mean over each one's sampled tokens; divide by the leaves."""
    counts = mask.sum(-1).clamp(min=1)
    return (torch.where(mask, loss, 0.0).sum(-1) / counts).sum()


def token_mean(loss: Tensor, mask: Tensor) -> Tensor:
    """Sum over sampled tokens; divide by their number in all leaf views."""
    return torch.where(mask, loss, 0.0).sum()


def count_leaves(lengths: Tensor) -> float:
    """Denominator of ``sequence_mean``; lengths [leaves] in sampled tokens."""
    return float(len(lengths))


def count_tokens(lengths: Tensor) -> float:
    """Denominator of ``token_mean``."""
    return float(lengths.sum())


@dataclass(frozen=True)
class Averaging:
    """How element losses become one number: a sum, and what the whole step divides it by."""

    total: Callable[[Tensor, Tensor], Tensor]
    denominator: Callable[[Tensor], float]


@dataclass(frozen=True)
class Loss:
    """One choice of each part of a policy loss."""

    ratio: Callable[[Views], Tensor]
    clip: Clip
    averaging: Averaging


def policy_loss(views: Views, loss: Loss, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's share of the policy loss, and sums for its metrics.

    The metrics are sums over sampled tokens (``tokens`` counts them) except ``ratio_highest`` and
    ``ratio_lowest``: shares of clipped tokens at either side, k3 estimate of KL(pi_old || pi).
    """
    ratio = loss.ratio(views)
    elements = clipped_objective(ratio, views.advantages, loss.clip)
    with torch.no_grad():
        metrics = _metrics(views, ratio, loss.clip)
    return loss.averaging.total(elements, views.mask) / denominator, metrics


def _metrics(views: Views, ratio: Tensor, clip: Clip) -> dict[str, Tensor]:
    mask, advantages = views.mask, views.advantages
    difference = log_ratio(views)
    kl = difference.exp() - 1 - difference  # k3 of log(pi_old / pi), samples from pi_old
    return {
        "tokens": mask.sum(),
        "clip_low": ((ratio < 1 - clip.low) & (advantages < 0) & mask).sum(),
        "clip_high": ((ratio > 1 + clip.high) & (advantages > 0) & mask).sum(),
        "kl": torch.where(mask, kl, 0.0).sum(),
        "ratio_highest": torch.where(mask, ratio, 1.0).max(),
        "ratio_lowest": torch.where(mask, ratio, 1.0).min(),
    }

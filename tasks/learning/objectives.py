"""Objectives: what a token adds to the policy loss, from its ratio and its advantage. Torch only.

An objective is a pair of functions of the ratio [L, S], the views and the clip range: the term
itself, and which tokens its bounds decide. Views must come from ``sampled_only``.
docs/own-algorithm.md has the formulas with their sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.learning.views import Views


@dataclass(frozen=True)
class Clip:
    """The ratio's range [1 - low, 1 + high]; with ``dual``, losses where A < 0 are at most -dual A.

    ``low`` infinite: the range has no lower end.
    """

    low: float
    high: float
    dual: float | None = None


UNBOUNDED = Clip(torch.inf, torch.inf)


@dataclass(frozen=True)
class Objective:
    """The term of the loss [L, S], and name -> which tokens a bound decides, bool [L, S]."""

    terms: Callable[[Tensor, Views, Clip | None], Tensor]
    bounded: Callable[[Tensor, Views, Clip | None], dict[str, Tensor]]


def clipped_terms(ratio: Tensor, views: Views, clip: Clip | None) -> Tensor:
    """Return -min(rho A, clip(rho) A) (PPO, arXiv 1707.06347, equation 7). [L, S]

    With dual clip at most -c A where A < 0 (arXiv 1912.09729, equation 8). Without a clip range:
    -rho A.
    """
    advantages = views.advantages
    plain = -ratio * advantages
    if clip is None:
        return plain
    clipped = torch.maximum(plain, -_within(ratio, clip) * advantages)
    if clip.dual is None:
        return clipped
    bounded = torch.minimum(clipped, -clip.dual * advantages)
    return torch.where(advantages < 0, bounded, clipped)


def clipped_tokens(ratio: Tensor, views: Views, clip: Clip | None) -> dict[str, Tensor]:
    """Return by which bound the clip decides a token's loss: name -> bool [L, S]."""
    clip, advantages = clip or UNBOUNDED, views.advantages
    return {
        "clip_low": (ratio < 1 - clip.low) & (advantages < 0),
        "clip_high": (ratio > 1 + clip.high) & (advantages > 0),
        "clip_dual": (ratio > (clip.dual or torch.inf)) & (advantages < 0),
    }


def weighted_terms(ratio: Tensor, views: Views, clip: Clip | None) -> Tensor:
    """Return -sg(clip(rho)) A log pi (CISPO, MiniMax-M1, arXiv 2506.13585, equation 4). [L, S]

    Each token keeps a gradient, whose weight is bounded. sg has no gradient.
    """
    weight = _within(ratio.detach(), clip or UNBOUNDED)
    return -weight * views.advantages * views.logprobs


def weighted_tokens(ratio: Tensor, views: Views, clip: Clip | None) -> dict[str, Tensor]:
    """Return which tokens have the weight of a bound: name -> bool [L, S]."""
    clip, learned = clip or UNBOUNDED, views.advantages != 0
    return {
        "clip_low": (ratio < 1 - clip.low) & learned,
        "clip_high": (ratio > 1 + clip.high) & learned,
        "clip_dual": torch.zeros_like(learned),
    }


def soft(positive: float, negative: float) -> Objective:
    """Return SAPO's objective: -(4 / tau) sigmoid(tau (rho - 1)) A (arXiv 2511.20347).

    ``positive`` is tau where A > 0, ``negative`` where not. The gradient fades with the distance of
    rho from 1, where its weight is 1.
    """

    def terms(ratio: Tensor, views: Views, clip: Clip | None) -> Tensor:
        advantages = views.advantages
        tau = advantages.new_tensor(negative).where(
            advantages <= 0, advantages.new_tensor(positive)
        )
        return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages

    def bounded(ratio: Tensor, views: Views, clip: Clip | None) -> dict[str, Tensor]:
        return clipped_tokens(ratio, views, None)

    return Objective(terms, bounded)


def trusted(low: float, high: float) -> Objective:
    """Return DPPO's objective: -sg(clip(rho)) A log pi of tokens in a trust region, else 0.

    A token is in it iff pi - mu <= ``high`` where A > 0, and mu - pi <= ``low`` where not: the
    probabilities of the policy that learns and of the sampler (arXiv 2602.04879, equation 13, for
    the total variation).
    """

    def terms(ratio: Tensor, views: Views, clip: Clip | None) -> Tensor:
        outside = torch.stack([*bounded(ratio, views, clip).values()]).any(0)
        return torch.where(outside, 0, weighted_terms(ratio, views, clip))

    @torch.no_grad()
    def bounded(ratio: Tensor, views: Views, clip: Clip | None) -> dict[str, Tensor]:
        gap = views.logprobs.exp() - views.sampler_logprobs.exp()
        return {
            "clip_low": (-gap > low) & (views.advantages < 0),
            "clip_high": (gap > high) & (views.advantages > 0),
            "clip_dual": torch.zeros_like(views.mask),
        }

    return Objective(terms, bounded)


def _within(ratio: Tensor, clip: Clip) -> Tensor:
    return ratio.clamp(1 - clip.low, 1 + clip.high)


CLIPPED = Objective(clipped_terms, clipped_tokens)
WEIGHTED = Objective(weighted_terms, weighted_tokens)
OBJECTIVES: dict[str, Callable[..., Objective]] = {  # kind -> settings of the row -> objective
    "clipped": lambda: CLIPPED,
    "cispo": lambda: WEIGHTED,
    "sapo": soft,
    "dppo": trusted,
}

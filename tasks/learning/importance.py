"""Importance of what was sampled: weights and masks by w = pi_old / pi_sampler. Torch only.

The engine that sampled and the trainer give a token different probabilities where they round
otherwise. A weight corrects the gradient for that (importance sampling), a mask leaves out what
differs too much. Both multiply the policy term of the loss, without gradient; what they set to 0
stays in every denominator and in the statistics of its group. They belong to leaf views: a token
that leaves share has one token weight, but a weight of a whole leaf for each of them. Views must
come from ``sampled_only``. docs/own-algorithm.md has the formulas with their sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.learning.views import Views, clamped

Measure = Callable[[Tensor, Tensor], Tensor]  # log w [L, S], mask [L, S] -> [L, S] or [L, 1]


@dataclass(frozen=True)
class Bounds:
    """A mask: what a measure has to lie between, ends included."""

    measure: Measure
    low: float
    high: float


@dataclass(frozen=True)
class Importance:
    """How the policy term of the loss is weighted, and what it leaves out.

    ``negative``: a token whose advantage is below 0 is left out where log pi_sampler - log pi is,
    on average over its leaf, above this (DeepSeek-V3.2, arXiv 2512.02556, equation 9). It looks at
    the policy that learns, so it changes with each optimizer step.
    """

    weight: Measure | None = None
    cap: float = torch.inf
    mask: Bounds | None = None
    negative: float | None = None  # nats a token


ALIKE = Importance()  # neither weights nor masks


def _lengths(mask: Tensor) -> Tensor:
    return mask.sum(-1, keepdim=True).clamp(min=1)


def of_token(log_weights: Tensor, mask: Tensor) -> Tensor:
    """Return w_t. [L, S]"""
    return clamped(log_weights).exp()


def of_sequence(log_weights: Tensor, mask: Tensor) -> Tensor:
    """Return the product of w_t over the leaf. [L, 1]"""
    return clamped(log_weights.sum(-1, keepdim=True)).exp()


def geometric(log_weights: Tensor, mask: Tensor) -> Tensor:
    """Return exp of the mean of log w_t over the leaf. [L, 1]"""
    return clamped(log_weights.sum(-1, keepdim=True) / _lengths(mask)).exp()


def mean_k3(log_weights: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of w_t - log w_t - 1 over the leaf: KL(sampler || old), not below 0. [L, 1]

    Its expectation over what the sampler draws is that divergence, a token (Schulman, 2020).
    """
    bounded = clamped(log_weights)
    return (bounded.exp() - bounded - 1).sum(-1, keepdim=True) / _lengths(mask)


WEIGHTS: dict[str, Measure] = {"token": of_token, "sequence": of_sequence}
MEASURES: dict[str, Measure] = {
    "token": of_token,  # IcePop
    "sequence": of_sequence,
    "geometric": geometric,
    "k3": mean_k3,
}


@torch.no_grad()
def weights(views: Views, importance: Importance) -> Tensor:
    """Return what multiplies the policy term of each token: its weight, or 0. [L, S]"""
    log_weights = views.old_logprobs - views.sampler_logprobs
    found = torch.ones_like(log_weights)
    if importance.weight:
        found = found * importance.weight(log_weights, views.mask).clamp(max=importance.cap)
    return torch.where(kept(views, importance), found, 0)


@torch.no_grad()
def kept(views: Views, importance: Importance) -> Tensor:
    """Return which tokens no mask leaves out. [L, S]"""
    stays = torch.ones_like(views.mask)
    if bounds := importance.mask:
        value = bounds.measure(views.old_logprobs - views.sampler_logprobs, views.mask)
        stays = stays & (value >= bounds.low) & (value <= bounds.high)
    if importance.negative is not None:
        drift = (views.sampler_logprobs - views.logprobs).sum(-1, keepdim=True)
        far = drift / _lengths(views.mask) > importance.negative
        stays = stays & ~(far & (views.advantages < 0))
    return stays

"""Policy and value losses over leaf views: padded rows of the sampled tokens of each leaf. Pure.

A loss is a record of independent choices: importance ratio, objective with its clip range, weights
and masks by the importance of what was sampled, averaging, KL term, entropy bonus. Nothing here
knows the name of an algorithm. Losses are sums, divided by a
denominator that counts the leaf views of the whole optimizer step, so the gradients of
micro-batches add up to that of the whole batch. docs/own-algorithm.md has the formulas, and the
differences from other trainers.

Dimensions: L leaves, S sampled tokens of the longest leaf. A *unit* is the run of tokens that share
one importance ratio: a token, a segment or the whole leaf. Units are numbered within a leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.learning import importance
from tasks.learning.importance import ALIKE, Importance
from tasks.learning.objectives import CLIPPED, Clip, Objective
from tasks.learning.views import Views, clamped, sampled_only

REFERENCE_LIMIT = 10.0

Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class KlPenalty:
    """A penalty in the loss: coefficient * estimator(d), d = log pi_ref - log pi."""

    estimator: Callable[[Tensor], Tensor]
    coefficient: float


@dataclass(frozen=True)
class ImportanceRatio:
    """Which tokens share one importance ratio, and against which log-probabilities."""

    units: Callable[[Tensor], Tensor]  # segments [L, S] -> unit of each token [L, S]
    old: Callable[[Views], Tensor]

    def of(self, views: Views) -> Tensor:
        """Return exp of the mean token log-ratio of each unit, at each of its tokens. [L, S]

        Token log-ratios are clamped to +-20 before the mean; the gradient goes through every
        token of the unit. ``views`` must come from ``sampled_only``. Units of one token: PPO,
        arXiv 1707.06347; of a whole leaf: GSPO, arXiv 2507.18071, equation 7.
        """
        log_ratio = clamped(views.logprobs - self.old(views))
        units = self.units(views.segments)
        return (_unit_sums(log_ratio, units) / _unit_lengths(views.mask, units)).exp()

    def count(self, segments: Tensor, mask: Tensor) -> Tensor:
        """Count the units of each leaf; a leaf without sampled tokens has none. [L]"""
        units = self.units(torch.where(mask, segments, 0))
        return (_scattered(mask.long(), units) > 0).sum(-1)


@dataclass(frozen=True)
class Averaging:
    """How token losses become one number: divisors of tokens, and a denominator of the whole step.

    ``divisors``: (mask [L, S], units [L, S]) -> [L, S], what each token's loss is divided by.
    ``sizes``: (lengths [L], units [L]) -> [L], what a leaf with so many sampled tokens and units
    adds to the denominator.
    """

    divisors: Callable[[Tensor, Tensor], Tensor]
    sizes: Callable[[Tensor, Tensor], Tensor]

    def denominator(self, lengths: Tensor, units: Tensor, weights: Tensor | None = None) -> float:
        """Return the denominator of an optimizer step, from all its leaves, at their weights [L].

        ``lengths`` and ``units`` [L] count their sampled tokens and units. None: all weights are 1.
        """
        sizes = self.sizes(lengths, units).double()
        return float((sizes if weights is None else weights * sizes).sum()) or 1.0

    def total(self, elements: Tensor, mask: Tensor, units: Tensor) -> Tensor:
        """Return the sum over a micro-batch, to be divided by the step's denominator."""
        return torch.where(mask, elements / self.divisors(mask, units), 0).sum()


@dataclass(frozen=True)
class Loss:
    """One choice of each part of a policy loss."""

    ratio: ImportanceRatio
    clip: Clip | None
    averaging: Averaging
    kl: KlPenalty | None = None
    entropy_bonus: float = 0.0
    importance: Importance = ALIKE  # of what was sampled: weights and masks
    objective: Objective = CLIPPED


# ---------------------------------------------------------------- ratios


def _each_token(segments: Tensor) -> Tensor:
    return torch.arange(segments.shape[-1], device=segments.device).expand_as(segments)


def _each_segment(segments: Tensor) -> Tensor:
    return segments


def _whole_leaf(segments: Tensor) -> Tensor:
    return torch.zeros_like(segments)


def _of_the_sampling_policy(views: Views) -> Tensor:
    return views.old_logprobs


def _of_the_sampler(views: Views) -> Tensor:
    return views.sampler_logprobs


def _of_this_very_policy(views: Views) -> Tensor:
    return views.logprobs.detach()


AGAINST = {"old": _of_the_sampling_policy, "sampler": _of_the_sampler}


RATIOS = {
    # On-policy: the value is 1 and the gradient that of -A log pi (Williams, 1992).
    "none": ImportanceRatio(_each_token, _of_this_very_policy),
    "token": ImportanceRatio(_each_token, _of_the_sampling_policy),
    "segment": ImportanceRatio(_each_segment, _of_the_sampling_policy),
    "sequence": ImportanceRatio(_whole_leaf, _of_the_sampling_policy),
}


def _scattered(values: Tensor, units: Tensor) -> Tensor:
    """Return the sum of each unit's values, at the index of the unit. [L, S]"""
    return torch.zeros_like(values).scatter_add(-1, units, values)


def _unit_sums(values: Tensor, units: Tensor) -> Tensor:
    """Return the sum over the unit of each token, at the token. [L, S]"""
    return _scattered(values, units).gather(-1, units)


def _unit_lengths(mask: Tensor, units: Tensor) -> Tensor:
    """Count the sampled tokens in the unit of each token, at least 1. [L, S]"""
    return _unit_sums(mask.long(), units).clamp(min=1)


# ---------------------------------------------------------------- averagings


def _by_itself(mask: Tensor, units: Tensor) -> Tensor:
    return torch.ones_like(units)


def _over_its_leaf(mask: Tensor, units: Tensor) -> Tensor:
    return mask.sum(-1, keepdim=True).clamp(min=1)


def _count_leaves(lengths: Tensor, units: Tensor) -> Tensor:
    return torch.ones_like(lengths)


def _count_tokens(lengths: Tensor, units: Tensor) -> Tensor:
    return lengths


def _count_units(lengths: Tensor, units: Tensor) -> Tensor:
    return units


TOKEN_MEAN = Averaging(_by_itself, _count_tokens)
SEQUENCE_MEAN = Averaging(_over_its_leaf, _count_leaves)
UNIT_MEAN = Averaging(_unit_lengths, _count_units)


def constant_length(tokens: float) -> Averaging:
    """Divide the sum over tokens by L * ``tokens``, whatever the lengths (arXiv 2503.20783).

    Raises ValueError for a length that is not positive.
    """
    if tokens <= 0:
        raise ValueError(f"constant_length of {tokens} tokens: give the response budget, above 0")

    def response_budgets(lengths: Tensor, units: Tensor) -> Tensor:
        return torch.full_like(lengths, tokens, dtype=torch.float64)

    return Averaging(_by_itself, response_budgets)


AVERAGINGS: dict[str, Callable[[float], Averaging]] = {  # response budget -> averaging
    "token_mean": lambda budget: TOKEN_MEAN,
    "sequence_mean": lambda budget: SEQUENCE_MEAN,
    "unit_mean": lambda budget: UNIT_MEAN,
    "constant_length": constant_length,
}


# ---------------------------------------------------------------- terms, element by element


def k1(log_ratio: Tensor) -> Tensor:
    """Return -d: unbiased, sometimes negative; its on-policy gradient in a loss has mean zero."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Return d^2 / 2: biased, never negative; its on-policy gradient is the KL divergence's."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """Return e^d - d - 1: unbiased, not negative (Schulman, Approximating KL Divergence, 2020)."""
    return log_ratio.exp() - log_ratio - 1


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def reference_log_ratio(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return d = log pi_ref - log pi, clamped to +-10, the input of the KL estimators. [L, S]"""
    return clamped(reference_logprobs - logprobs, REFERENCE_LIMIT)


# ---------------------------------------------------------------- the losses


def policy_loss(
    views: Views, loss: Loss, denominator: float, weights: Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """Return the micro-batch's share of the policy loss, a scalar, and sums for its metrics.

    The importance weight, or the 0 of a mask, multiplies the policy term alone; KL and entropy are
    averaged as the policy term is (**chosen**). ``denominator`` is ``loss.averaging.denominator``
    of the whole optimizer step. ``weights`` [L]: of the leaves, None: 1 each; they multiply all
    terms and enter the denominator, but no metric.
    Raises ValueError if the loss has a KL term and the views have no reference.

    Metrics are sums over sampled tokens (``tokens`` counts them): ``clip_low``, ``clip_high``,
    ``clip_dual`` (tokens clipped), ``kl`` (k3 estimate of KL(pi_old || pi)), ``entropy``,
    ``importance_weight``, ``importance_masked`` (tokens that a mask leaves out), ``kl_reference``
    (k3 against the reference, where there is one); but
    ``ratio_highest``, ``ratio_lowest`` and ``mismatch_highest`` (|old - sampler|) are extremes.
    """
    views = sampled_only(views)
    ratio, weight = loss.ratio.of(views), importance.weights(views, loss.importance)
    elements = weight * loss.objective.terms(ratio, views, loss.clip)
    if loss.kl:
        elements = elements + loss.kl.coefficient * loss.kl.estimator(_from_reference(views))
    if loss.entropy_bonus:
        elements = elements - loss.entropy_bonus * views.entropies
    if weights is not None:
        elements = elements * weights[:, None]
    total = loss.averaging.total(elements, views.mask, loss.ratio.units(views.segments))
    with torch.no_grad():
        metrics = _metrics(views, ratio, weight, loss)
    return total / denominator, metrics


def _from_reference(views: Views) -> Tensor:
    """Return the log-ratio to the reference [L, S]; raise ValueError if the views have none."""
    if views.reference_logprobs is None:
        raise ValueError(
            "the loss has a KL term, and the views have no reference_logprobs: give those of the "
            "reference policy, or set the row's kl to null"
        )
    return reference_log_ratio(views.logprobs, views.reference_logprobs)


def _metrics(views: Views, ratio: Tensor, weights: Tensor, loss: Loss) -> Metrics:
    """Return sums over sampled tokens; ``views`` must come from ``sampled_only``, [L, S]."""
    mask = views.mask
    log_ratio = clamped(views.logprobs - views.old_logprobs)
    sums = {
        "tokens": mask,
        **loss.objective.bounded(ratio, views, loss.clip),
        "kl": k3(log_ratio),  # of log(pi / pi_old), samples from pi_old
        "entropy": views.entropies,
        "importance_weight": torch.where(mask, weights, 0),
        "importance_masked": mask & ~importance.kept(views, loss.importance),
    }
    if views.reference_logprobs is not None:
        sums["kl_reference"] = k3(_from_reference(views))
    return {name: values.sum() for name, values in sums.items()} | _extremes(views, ratio)


def _extremes(views: Views, ratio: Tensor) -> Metrics:
    """Return the extremes over sampled tokens; those of ratio 1 if there are none."""
    lowest, highest = torch.where(views.mask, ratio, torch.inf), torch.where(views.mask, ratio, 0)
    mismatch = (views.old_logprobs - views.sampler_logprobs).abs()
    some = views.mask.any()
    return {
        "ratio_highest": torch.where(some, highest.amax(), 1),
        "ratio_lowest": torch.where(some, lowest.amin(), 1),
        "mismatch_highest": mismatch.amax(),
    }


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, Metrics]:
    """Return the sum over sampled tokens of 0.5 max((V - R)^2, (V_clipped - R)^2), and metrics.

    All tensors are [L, S]. V_clipped = V_old + clamp(V - V_old, +-clip) (None: V): a value further
    than ``clip`` from the old one gets no gradient where the clipped loss is larger (reference code
    of PPO). Metrics are sums: ``value_clipped`` (tokens whose loss is the clipped one),
    ``value_error`` (squared error before clipping).
    """
    values, old_values, returns = (torch.where(mask, v, 0) for v in (values, old_values, returns))
    error = (values - returns).square()
    reach = torch.inf if clip is None else clip
    clipped = values.clamp(old_values - reach, old_values + reach)
    clipped_error = (clipped - returns).square()
    metrics = {
        "value_clipped": (clipped_error > error).sum(),
        "value_error": error.detach().sum(),
    }
    return 0.5 * torch.maximum(error, clipped_error).sum(), metrics

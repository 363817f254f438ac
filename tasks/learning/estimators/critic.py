"""Generalised advantage estimation with a critic, token by token (arXiv 1506.02438). Pure.

Time runs over a leaf's sampled tokens alone: the tokens that tools or the environment put between
two of them are no steps of it. r_t is ``token_rewards[t]``, plus ``reward`` at the last token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tasks.learning.estimators import Episode, Estimator, Floats, Group
from tasks.learning.estimators.group import whitened


def gae(gamma: float, lambda_: float) -> Estimator:
    """delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lambda A_{t+1};  then whitened.

    V after the last token is 0, also where the trajectory was cut (**chosen**). Whitening is over
    all sampled tokens of the batch, a shared token once for each leaf; as in ``batch_whitened``.
    The estimator raises ValueError where an episode has no value for each of its tokens.
    """

    def estimate(groups: Sequence[Group]) -> list[list[Floats]]:
        return whitened(token_advantages(groups, gamma, lambda_))

    return estimate


def value_targets(groups: Sequence[Group], gamma: float, lambda_: float) -> list[list[Floats]]:
    """What the critic learns: A_t + V_t with A before whitening; group, leaf -> [S].

    With lambda 1 this is the discounted sum of the rewards from t on. Raises as ``gae``.
    """
    advantages = token_advantages(groups, gamma, lambda_)
    return [
        [values_S + A_S for values_S, A_S in zip(_values(group), leaves, strict=True)]
        for group, leaves in zip(groups, advantages, strict=True)
    ]


def explained_variance(values: Floats, targets: Floats) -> float:
    """1 - Var(targets - values) / Var(targets); arrays of one shape, any.

    1 for a perfect critic, 0 for one as good as a constant, below 0 for a worse one. **Chosen**:
    0 where the targets have no spread, since there is nothing to explain.
    """
    spread = np.var(targets - targets.flat[0]) if targets.size else 0.0  # exactly 0 if all equal
    return float(1 - np.var(targets - values) / spread) if spread else 0.0


def token_advantages(groups: Sequence[Group], gamma: float, lambda_: float) -> list[list[Floats]]:
    """GAE before whitening; group, leaf -> [S]. Raises as ``gae``."""
    values = [values_S for group in groups for values_S in _values(group)]
    rewards = [token_rewards(leaf) for group in groups for leaf in group]
    deltas = [
        temporal_differences(r_S, V_S, gamma) for r_S, V_S in zip(rewards, values, strict=True)
    ]
    advantages = iter(discounted_sums(deltas, gamma * lambda_))
    return [[next(advantages) for _ in group] for group in groups]


def token_rewards(leaf: Episode) -> Floats:
    """r_t: ``token_rewards`` with ``reward`` added at the last sampled token. [S]"""
    rewards_S = leaf.token_rewards.astype(np.float64)
    rewards_S[-1:] += leaf.reward
    return rewards_S


def temporal_differences(rewards_T: Floats, values_T: Floats, gamma: float) -> Floats:
    """delta_t = r_t + gamma V_{t+1} - V_t, with V = 0 after the last. [T]"""
    return rewards_T + gamma * np.append(values_T[1:], 0.0)[: len(values_T)] - values_T


def discounted_sums(terms: Sequence[Floats], factor: float) -> list[Floats]:
    """y_t = x_t + factor y_{t+1} along each array x, with y = 0 after its last entry.

    All arrays walk back in time side by side, so Python takes as many steps as the longest has.
    """
    sums_TN = np.zeros((max(map(len, terms), default=0), len(terms)))
    for n, terms_T in enumerate(terms):
        sums_TN[: len(terms_T), n] = terms_T
    for t in reversed(range(len(sums_TN) - 1)):
        sums_TN[t] += factor * sums_TN[t + 1]
    return [sums_TN[: len(terms_T), n].copy() for n, terms_T in enumerate(terms)]


def _values(group: Group) -> list[Floats]:
    for index, leaf in enumerate(group):
        count = 0 if leaf.values is None else len(leaf.values)
        if leaf.values is None or count != len(leaf.tokens):
            raise ValueError(
                f"leaf {index} of a group has {count} values for {len(leaf.tokens)} sampled "
                "tokens: gae needs the critic's value before each of them"
            )
    return [leaf.values for leaf in group if leaf.values is not None]

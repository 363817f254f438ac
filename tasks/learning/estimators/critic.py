"""Generalised advantage estimation with a critic, token by token (arXiv 1506.02438). Pure.

Time runs over the S sampled tokens of a leaf: tokens that tools or the environment put between two
of them are no time steps. r_t is ``token_rewards[t]``, plus ``reward`` at the last token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from params.schema import algorithms
from tasks.learning.estimators import Advantages, Floats, Group, LeafTrajectory
from tasks.learning.estimators.group import whitened


def gae(groups: Sequence[Group], choice: algorithms.Gae) -> Advantages:
    """Return A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, whitened.

    arXiv 1506.02438, equations 11 and 16. V after the last token is 0, also where the trajectory
    was cut (**chosen**). Whitening is over all sampled tokens of the batch, a shared token once for
    each leaf, as in ``batch_whitened``.
    Raises ValueError where an episode lacks a value for any of its tokens.
    """
    return whitened(token_advantages(groups, choice.gamma, choice.lambda_))


def value_targets(groups: Sequence[Group], gamma: float, lambda_: float) -> Advantages:
    """Return the critic's targets A_t + V_t, with A before whitening; group, leaf -> [S].

    With lambda 1 this is the discounted sum of the rewards from t on. Raises ValueError as ``gae``.
    """
    advantages = token_advantages(groups, gamma, lambda_)
    return [
        [values_S + A_S for values_S, A_S in zip(_values(group), leaves, strict=True)]
        for group, leaves in zip(groups, advantages, strict=True)
    ]


def explained_variance(values: Floats, targets: Floats) -> float:
    """Return 1 - Var(targets - values) / Var(targets); both arrays have the same shape.

    That is 1 for a perfect critic, 0 for one as good as a constant, below 0 for a worse one.
    **Chosen**: 0 where all targets are equal, since there is nothing to explain.
    """
    spread = np.var(targets - targets.flat[0]) if targets.size else 0.0  # exactly 0 if all equal
    return float(1 - np.var(targets - values) / spread) if spread else 0.0


def token_advantages(groups: Sequence[Group], gamma: float, lambda_: float) -> Advantages:
    """Return GAE before whitening; group, leaf -> [S]. Raises ValueError as ``gae``."""
    values = [values_S for group in groups for values_S in _values(group)]
    rewards = [token_rewards(leaf) for group in groups for leaf in group]
    deltas = [
        temporal_differences(r_S, V_S, gamma) for r_S, V_S in zip(rewards, values, strict=True)
    ]
    advantages = iter(discounted_sums(deltas, gamma * lambda_))
    return [[next(advantages) for _ in group] for group in groups]


def token_rewards(leaf: LeafTrajectory) -> Floats:
    """Return r_t: ``token_rewards`` with ``reward`` added at the last sampled token. [S]"""
    rewards_S = leaf.token_rewards.astype(np.float64)
    rewards_S[-1:] += leaf.reward
    return rewards_S


def temporal_differences(rewards: Floats, values: Floats, gamma: float) -> Floats:
    """Return delta_t = r_t + gamma V_{t+1} - V_t, with V = 0 after the last. [S] or [E] each."""
    return rewards + gamma * np.append(values[1:], 0.0)[: len(values)] - values


def discounted_sums(terms: Sequence[Floats], factor: float) -> list[Floats]:
    """Return y_t = x_t + factor y_{t+1} along each array x, with y = 0 after its last entry.

    ``terms``: leaf -> [S] or [E]; the result has the same shapes. All leaves step back in time
    together, so the loop is as long as the longest of them.
    """
    sums_SL = np.zeros((max(map(len, terms), default=0), len(terms)))
    for leaf, terms_S in enumerate(terms):
        sums_SL[: len(terms_S), leaf] = terms_S
    for t in reversed(range(len(sums_SL) - 1)):
        sums_SL[t] += factor * sums_SL[t + 1]
    return [sums_SL[: len(terms_S), leaf].copy() for leaf, terms_S in enumerate(terms)]


def _values(group: Group) -> list[Floats]:
    """Return leaf -> [S]. Raises ValueError where a leaf lacks a value for any of its tokens."""
    for index, leaf in enumerate(group):
        count = 0 if leaf.values is None else len(leaf.values)
        if leaf.values is None or count != len(leaf.tokens):
            raise ValueError(
                f"leaf {index} of a group has {count} values for {len(leaf.tokens)} sampled "
                "tokens: gae needs the critic's value before each of them"
            )
    return [leaf.values for leaf in group if leaf.values is not None]

"""Advantages without a critic and without environment steps: rewards against their group or batch.

A leaf's whole reward is ``reward`` plus the sum of ``token_rewards``. A group is the leaves of one
question. Standard deviations are sample ones (ddof 1) with 1e-6 added. Where there is no spread,
and for a member without others, advantages are exactly 0. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.learning.estimators import EPSILON, Estimator, Floats, Group

Keys = NDArray[np.int64]


def returns() -> Estimator:
    """The trajectory's whole reward on every sampled token (Williams 1992)."""
    return _each_group(lambda group: _on_every_token(whole_rewards(group), group))


def group_relative(std: bool) -> Estimator:
    """A_i = (r_i - mean) / (std + 1e-6) of the group; without ``std`` A_i = r_i - mean.

    With std GRPO (arXiv 2402.03300, section 4.1.2) and, over all M leaves of a tree, ARPO's soft
    estimate (arXiv 2507.19849, section 3.2); without it Dr.GRPO (arXiv 2503.20783).
    """
    return _each_group(lambda group: _on_every_token(group_advantages(group, std), group))


def leave_one_out() -> Estimator:
    """A_i = r_i - mean of the others' rewards = n / (n - 1) * (r_i - mean); RLOO, 2402.14740.

    **Chosen**: a single member has no others to be compared with, and gets exactly 0.
    """

    def credit(group: Group) -> list[Floats]:
        scale = len(group) / max(len(group) - 1, 1)
        return _on_every_token(scale * group_advantages(group, std=False), group)

    return _each_group(credit)


def batch_whitened(baseline: bool) -> Estimator:
    """Returns R_t = sum of token_rewards from t on, plus reward, whitened; REINFORCE++, 2501.03262.

    Whitening is over all sampled tokens of the batch; a token that several leaves share counts
    once for each of them. With ``baseline`` the mean whole reward of the group is subtracted
    first. **Chosen**: gamma is 1.
    """

    def estimate(groups: Sequence[Group]) -> list[list[Floats]]:
        return whitened([_returns_to_go(group, baseline) for group in groups])

    return estimate


def whole_rewards(group: Group) -> Floats:
    """reward + sum(token_rewards) of each leaf. [M]"""
    return np.array([leaf.reward + leaf.token_rewards.sum() for leaf in group], np.float64)


def group_advantages(group: Group, std: bool) -> Floats:
    """The group-relative advantage of each leaf. [M]"""
    rewards_M = whole_rewards(group)
    return relative(rewards_M, np.zeros(len(rewards_M), np.int64), std)


def mean_by_key(values_N: Floats, keys_N: Keys) -> Floats:
    """At each entry the mean over all entries of the same key. [N] -> [N]

    Equal values have exactly that value as their mean, whatever their number: the mean is taken of
    the differences from the first one.
    """
    _, first, inverse, counts = np.unique(
        keys_N, return_index=True, return_inverse=True, return_counts=True
    )
    start_N = values_N[first][inverse]
    return start_N + (np.bincount(inverse, values_N - start_N) / counts)[inverse]


def relative(values_N: Floats, keys_N: Keys, std: bool) -> Floats:
    """x - mean over the entries of the same key; with ``std`` divided by std + 1e-6. [N] -> [N]"""
    deviations_N = values_N - mean_by_key(values_N, keys_N)
    if not std:
        return deviations_N
    _, inverse, counts = np.unique(keys_N, return_inverse=True, return_counts=True)
    variances = np.bincount(inverse, deviations_N**2) / np.maximum(counts - 1, 1)
    return deviations_N / (np.sqrt(variances)[inverse] + EPSILON)


def whitened(batch: Sequence[Sequence[Floats]]) -> list[list[Floats]]:
    """(x - mean) / (std + 1e-6) over every entry of every array; the nesting stays."""
    arrays = [array for leaves in batch for array in leaves]
    values_N = joined(arrays)
    advantages_N = relative(values_N, np.zeros(len(values_N), np.int64), std=True)
    pieces = iter(split_like(advantages_N, arrays))
    return [[next(pieces) for _ in leaves] for leaves in batch]


def joined(arrays: Sequence[Floats]) -> Floats:
    """All entries in one array, which is empty where there are none."""
    return np.concatenate([np.zeros(0), *arrays])


def split_like(values_N: Floats, arrays: Sequence[NDArray[Any]]) -> list[Floats]:
    """Undo ``joined``: pieces as long as the arrays."""
    ends = np.cumsum([len(array) for array in arrays], dtype=np.int64)
    return np.split(values_N, ends)[:-1]


def _each_group(credit: Callable[[Group], list[Floats]]) -> Estimator:
    return lambda groups: [credit(group) for group in groups]


def _on_every_token(advantages_M: Floats, group: Group) -> list[Floats]:
    return [
        np.full(len(leaf.tokens), advantage)
        for advantage, leaf in zip(advantages_M, group, strict=True)
    ]


def _returns_to_go(group: Group, baseline: bool) -> list[Floats]:
    rewards_M = np.array([leaf.reward for leaf in group], np.float64)
    if baseline:
        rewards_M -= mean_by_key(whole_rewards(group), np.zeros(len(group), np.int64))
    return [
        reward + np.cumsum(leaf.token_rewards[::-1])[::-1]
        for reward, leaf in zip(rewards_M, group, strict=True)
    ]

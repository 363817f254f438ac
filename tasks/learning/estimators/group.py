"""Advantages without a critic and without environment steps: rewards against their group or batch.

A leaf's whole reward is ``reward`` plus the sum of ``token_rewards``. A group is the leaves of one
question. Standard deviations are sample ones (ddof 1) with 1e-6 added. Where all values are equal,
and for a member without others, advantages are exactly 0. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from params.schema import algorithms
from tasks.learning.estimators import EPSILON, Advantages, Floats, Group

Keys = NDArray[np.int64]


def nothing(groups: Sequence[Group], choice: algorithms.NoEstimator) -> Advantages:
    """Return 0 for each sampled token: what is learned comes from a teacher."""
    return [on_every_token(np.zeros(len(group)), group) for group in groups]


def returns(groups: Sequence[Group], choice: algorithms.Return) -> Advantages:
    """Return the trajectory's whole reward on every sampled token (REINFORCE, Williams 1992)."""
    return [on_every_token(whole_rewards(group), group) for group in groups]


def group_relative(groups: Sequence[Group], choice: algorithms.GroupRelative) -> Advantages:
    """Return A_i = (r_i - mean) / (std + 1e-6) of the group; without ``std`` A_i = r_i - mean.

    With std GRPO (arXiv 2402.03300, section 4.1.2) and, over all L leaves of a tree, ARPO's soft
    estimate (arXiv 2507.19849, section 3.2); without it Dr.GRPO (arXiv 2503.20783).
    """
    return [on_every_token(group_advantages(group, choice.std), group) for group in groups]


def leave_one_out(groups: Sequence[Group], choice: algorithms.LeaveOneOut) -> Advantages:
    """Return A_i = r_i - mean of the others' rewards = L / (L - 1) (r_i - mean); RLOO, 2402.14740.

    **Chosen**: a single member has no others to be compared with, and gets exactly 0.
    """
    advantages = []
    for group in groups:
        scale = len(group) / max(len(group) - 1, 1)
        advantages.append(on_every_token(scale * group_advantages(group, std=False), group))
    return advantages


def mean_relative(groups: Sequence[Group], choice: algorithms.MeanRelative) -> Advantages:
    """Return A_i = (r_i - mean) / (mean + 1e-6) of the group; MaxRL, arXiv 2602.02710.

    A rare success weighs as much as the group is large, however rare. Exactly 0 without spread.
    Raises ValueError for a group with spread whose mean is not positive: its best leaves would get
    the lowest advantages.
    """
    advantages = []
    for group in groups:
        rewards_L, deviations_L = whole_rewards(group), group_advantages(group, std=False)
        mean = float((rewards_L - deviations_L).mean()) if len(group) else 0.0
        if mean <= 0 and deviations_L.any():
            raise ValueError(
                f"the rewards of a group have the mean {mean:.3g}, and the estimator mean_relative "
                "divides by it: give no reward below 0 (in reinforce.reward, such as format.broken "
                "and answer.wrong), or take the estimator group_relative"
            )
        advantages.append(on_every_token(deviations_L / (mean + EPSILON), group))
    return advantages


def part_relative(groups: Sequence[Group], choice: algorithms.PartRelative) -> Advantages:
    """Return each part of the reward relative to its group, added up and whitened over the batch.

    A_i = sum over parts k of weight_k (r_ik - mean_k) / (std_k + 1e-6), then less the mean and
    divided by the standard deviation over all leaves of the batch (+ 1e-6); GDPO, arXiv 2601.05242.
    So a part counts by its weight (1 unless ``weights`` names it), whatever its scale is.
    **Chosen**: one value a leaf is whitened, whatever its length.
    """
    sums = [np.zeros(len(group)) for group in groups]
    for values_L, group in zip(sums, groups, strict=True):
        names = {name: None for leaf in group for name in leaf.parts or {}}
        for name in names:
            part_L = np.array([(leaf.parts or {}).get(name, 0.0) for leaf in group], np.float64)
            relative_L = relative(part_L, np.zeros(len(group), np.int64), std=True)
            values_L += choice.weights.get(name, 1.0) * relative_L
    (whitened_sums,) = whitened([sums])
    return [on_every_token(v_L, group) for v_L, group in zip(whitened_sums, groups, strict=True)]


def batch_whitened(groups: Sequence[Group], choice: algorithms.BatchWhitened) -> Advantages:
    """Return R_t = sum of token_rewards from t on, plus reward, whitened; REINFORCE++, 2501.03262.

    Whitening is over all sampled tokens of the batch; a token that several leaves share counts
    once for each of them. With ``baseline`` the mean whole reward of the group is subtracted
    first. **Chosen**: gamma is 1.
    """
    return whitened([returns_to_go(group, choice.baseline) for group in groups])


def on_every_token(values_L: Floats, group: Group) -> list[Floats]:
    """Repeat each leaf's value on its sampled tokens; leaf -> [S]."""
    return [np.full(len(leaf.tokens), value) for value, leaf in zip(values_L, group, strict=True)]


def returns_to_go(group: Group, baseline: bool) -> list[Floats]:
    """Return the undiscounted reward from each token on; leaf -> [S].

    With ``baseline`` less the mean whole reward of the group.
    """
    rewards_L = np.array([leaf.reward for leaf in group], np.float64)
    if baseline:
        rewards_L -= mean_by_key(whole_rewards(group), np.zeros(len(group), np.int64))
    return [
        reward + np.cumsum(leaf.token_rewards[::-1])[::-1]
        for reward, leaf in zip(rewards_L, group, strict=True)
    ]


def whole_rewards(group: Group) -> Floats:
    """Return reward + sum(token_rewards) of each leaf. [L]"""
    sums = [
        leaf.reward + leaf.token_rewards.sum() if leaf.whole is None else leaf.whole
        for leaf in group
    ]
    return np.array(sums, np.float64)


def group_advantages(group: Group, std: bool) -> Floats:
    """Return the group-relative advantage of each leaf. [L]"""
    rewards_L = whole_rewards(group)
    return relative(rewards_L, np.zeros(len(rewards_L), np.int64), std)


def mean_by_key(values_N: Floats, keys_N: Keys) -> Floats:
    """Return at each entry the mean over all entries of the same key. [N] -> [N]

    The mean is taken of the differences from the first value, so the mean of any number of equal
    values is exactly that value.
    """
    _, first, inverse, counts = np.unique(
        keys_N, return_index=True, return_inverse=True, return_counts=True
    )
    start_N = values_N[first][inverse]
    return start_N + (np.bincount(inverse, values_N - start_N) / counts)[inverse]


def relative(values_N: Floats, keys_N: Keys, std: bool) -> Floats:
    """Return x - mean by key; with ``std`` divided by the key's std + 1e-6. [N] -> [N]"""
    deviations_N = values_N - mean_by_key(values_N, keys_N)
    if not std:
        return deviations_N
    _, inverse, counts = np.unique(keys_N, return_inverse=True, return_counts=True)
    variances = np.bincount(inverse, deviations_N**2) / np.maximum(counts - 1, 1)
    return deviations_N / (np.sqrt(variances)[inverse] + EPSILON)


def whitened(batch: Sequence[Sequence[Floats]]) -> Advantages:
    """Return (x - mean) / (std + 1e-6) over the entries of all arrays; the nesting stays."""
    arrays = [array for leaves in batch for array in leaves]
    values_N = joined(arrays)
    advantages_N = relative(values_N, np.zeros(len(values_N), np.int64), std=True)
    pieces = iter(split_like(advantages_N, arrays))
    return [[next(pieces) for _ in leaves] for leaves in batch]


def joined(arrays: Sequence[Floats]) -> Floats:
    """Lay all arrays end to end. [N], with N = 0 where there are none."""
    return np.concatenate([np.zeros(0), *arrays])


def split_like(values_N: Floats, arrays: Sequence[NDArray[Any]]) -> list[Floats]:
    """Undo ``joined``: cut [N] into pieces as long as the arrays."""
    ends = np.cumsum([len(array) for array in arrays], dtype=np.int64)
    return np.split(values_N, ends)[:-1]

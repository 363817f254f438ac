"""Advantages that follow the tree: a token's credit comes from the leaves that contain it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from params.schema import algorithms
from tasks.learning.estimators import EPSILON, Advantages, Floats, Group
from tasks.learning.estimators.group import (
    group_advantages,
    joined,
    mean_by_key,
    on_every_token,
    relative,
    split_like,
    whole_rewards,
)

Tokens = NDArray[np.int64]  # identities in the tree, of a leaf's sampled tokens


def prefix_calibrated(groups: Sequence[Group], choice: algorithms.PrefixCalibrated) -> Advantages:
    """Return A_{i,t} = mean group-relative advantage of the leaves that contain token t.

    GPG (arXiv 2512.10365, equation 29) and ARPO's hard estimate (arXiv 2507.19849, section 3.2).
    **Chosen**: inclusive, so the prefix goes through a_t. The equation as printed ends before a_t,
    which would give the first token 0, and siblings equal credit on the token where they part.
    **Chosen**: two leaves share a token where ``Episode.tokens`` is equal, by default the tree's
    own lineage; ``token_identities`` makes keys that also merge prefixes equal by accident.
    """
    advantages = []
    for group in groups:
        tokens = [leaf.tokens for leaf in group]
        keys_N = np.concatenate([np.zeros(0, np.int64), *tokens])
        values_N = joined(on_every_token(group_advantages(group, std=True), group))
        advantages.append(split_like(mean_by_key(values_N, keys_N), tokens))
    return advantages


def rollout_relative(groups: Sequence[Group], choice: algorithms.RolloutRelative) -> Advantages:
    """Return (r - m_q) / (s_q + 1e-6) + (r - m_T) / (s_T + 1e-6); Tree-GRPO, arXiv 2509.21240.

    q are all leaves of the question, T those that begin with the same initial rollout. The means
    and sample standard deviations of a single leaf are 0 and 1, as in the code of the paper, which
    is its reward on top of the first term.
    """
    advantages = []
    for group in groups:
        rewards_L = whole_rewards(group)
        first = [
            int(leaf.tokens[0]) if len(leaf.tokens) else -1 - i for i, leaf in enumerate(group)
        ]
        every, of_rollouts = np.zeros(len(group), np.int64), np.array(first, np.int64)
        total_L = _standardised(rewards_L, every) + _standardised(rewards_L, of_rollouts)
        advantages.append(on_every_token(total_L, group))
    return advantages


def _standardised(rewards_L: Floats, keys_L: NDArray[np.int64]) -> Floats:
    """Return (r - mean) / (std + 1e-6) by key, where a single entry has mean 0 and std 1. [L]"""
    _, inverse, counts = np.unique(keys_L, return_inverse=True, return_counts=True)
    alone_L = counts[inverse] == 1
    return np.where(alone_L, rewards_L / (1 + EPSILON), relative(rewards_L, keys_L, std=True))


def tree_value(groups: Sequence[Group], choice: algorithms.TreeValue) -> Advantages:
    """Return A_{i,t} = V after the segment of token t - V before it, without a model of V.

    V of a leaf is its whole reward. V of a point where paths part is the mean over the paths that
    go on from there, each counted once: over the leaves below, a path that branched would count
    more. A segment is what lies between two such points, and all leaves that share it share its
    credit, which stands instead of the final reward: along leaf i the credits of its segments sum
    to r_i - V(prompt). In a group that parts at the prompt alone A_i = r_i - mean.

    V before a segment contains the path itself, which makes the expected credit (m - 1) / m of what
    it should be, m being the paths at that point: less where few part. With ``leave_one_out`` it is
    the mean over the other paths, which is m / (m - 1) times the credit above. A single path has
    no others, and its segment goes on to where paths part.

    With that, and every path counted once in the loss (``path_weights``), the gradient is that of
    E[r]: for a token a_t of a path with value V and siblings with values V', E[grad log pi(a_t) V']
    = 0, because siblings are drawn apart, and E[V | a_t and what is before] = Q(a_t); so E[weight
    * grad log pi(a_t) * A] = E[weight * grad log pi(a_t) * Q(a_t)], and the weights make that the
    sum over a trajectory of the policy's own. benchmarks/gradient_bias.py proves it by enumeration.

    **Chosen**: marks where nothing parts cut no segment. V there would come from a single path, so
    all credit would go to what is before the mark and none to what is after it.
    **Chosen**: leaves that end at the same point are a path each from there.
    Where entropy decides on branching (ARPO), the path that was judged is no fair draw among its
    siblings, and rollouts that fill up a budget depend on the branches before them: both leave a
    small bias (docs/own-algorithm.md).
    """
    advantages = []
    for group in groups:
        tokens = [leaf.tokens for leaf in group]
        credits = [np.zeros(len(path)) for path in tokens]
        for segment in _segments(range(len(group)), 0, tokens, whole_rewards(group))[1]:
            others = segment.paths - 1
            scale = segment.paths / others if choice.leave_one_out and others else 1.0
            for leaf in segment.leaves:
                credits[leaf][segment.start : segment.end] = scale * segment.change
        advantages.append(credits)
    return advantages


def path_weights(tokens: Sequence[Tokens]) -> Floats:
    """Return the weight of each leaf that makes every path count once. [L]

    ``tokens``: leaf -> [S]. A path from the prompt has weight 1, and those that go on from a point
    where paths part share the weight of what is before it equally. So the leaves below a token have
    its weight together, and all of them that of the paths from the prompt. Each draw is a fair one
    given what is before it, and branching divides a weight without looking ahead: E[sum_i weight_i
    f(path i)] = E[paths from the prompt] E[f(a trajectory)] for every f, however the rule depends
    on what was sampled. Over leaves, each of weight 1, that is not so.
    """
    weights_L = np.ones(len(tokens))
    waiting = _parted(range(len(tokens)), 0, tokens)
    while waiting:
        path = waiting.pop()
        if len(path) > 1:
            parts = _parted(path, _shared([tokens[leaf] for leaf in path]), tokens)
            weights_L[path] /= len(parts)
            waiting += parts
    return weights_L


class Segment(NamedTuple):
    """The tokens from ``start`` to ``end`` of the ``leaves`` that share them.

    ``change`` is V after them less V before, ``paths`` how many go on from where they start.
    """

    leaves: Sequence[int]
    start: int
    end: int
    change: float
    paths: int


def _segments(
    leaves: Sequence[int], start: int, tokens: Sequence[Tokens], rewards_L: Floats
) -> tuple[float, list[Segment]]:
    """Return V after the first ``start`` tokens, which the leaves share, and all segments behind.

    ``tokens``: leaf -> [S].
    """
    paths = _parted(leaves, start, tokens)
    ends = [_shared([tokens[leaf] for leaf in path]) for path in paths]
    values: list[float] = []
    behind: list[Segment] = []
    for path, end in zip(paths, ends, strict=True):
        alone = len(path) == 1
        value, segments = (
            (rewards_L[path[0]], []) if alone else _segments(path, end, tokens, rewards_L)
        )
        values.append(value)
        behind += segments
    before_N = mean_by_key(np.array(values, np.float64), np.zeros(len(values), np.int64))
    first_segments = [
        Segment(path, start, end, value - before, len(paths))
        for path, end, value, before in zip(paths, ends, values, before_N, strict=True)
    ]
    return float(before_N[0]) if len(before_N) else 0.0, first_segments + behind


def _parted(leaves: Sequence[int], start: int, tokens: Sequence[Tokens]) -> list[list[int]]:
    """Group leaves that share their first ``start`` tokens by the next; one that ends is alone."""
    paths: dict[tuple[bool, int], list[int]] = {}
    for leaf in leaves:
        ended = start == len(tokens[leaf])
        paths.setdefault((ended, leaf if ended else int(tokens[leaf][start])), []).append(leaf)
    return list(paths.values())


def _shared(paths: Sequence[Tokens]) -> int:
    """Return how many tokens all paths [S] share from the start."""
    first, *others = paths
    return min((_common_prefix(first, other) for other in others), default=len(first))


def token_identities(paths: Sequence[NDArray[np.integer[Any]]]) -> list[NDArray[np.int64]]:
    """Number tokens by the prefix that they end; leaf -> [T] int64.

    ``paths``: leaf -> [T] the token ids after the prompt, observed ones included, in full. Two
    positions of different leaves get the same identity where, and only where, the token ids up to
    and including them are equal. In sorted order a path shares its longest common prefix with the
    one before it, so each path copies the identities of that prefix and numbers the rest anew.
    """
    ids = [np.asarray(path, np.int64) for path in paths]
    identities = [np.zeros(0, np.int64)] * len(ids)
    last = known = np.zeros(0, np.int64)
    count = 0
    for leaf in sorted(range(len(ids)), key=lambda leaf: ids[leaf].tobytes()):
        shared = _common_prefix(last, ids[leaf])
        fresh = len(ids[leaf]) - shared
        known = np.append(known[:shared], np.arange(count, count + fresh))
        last, identities[leaf], count = ids[leaf], known, count + fresh
    return identities


def _common_prefix(a: Tokens, b: Tokens) -> int:
    """Return how many entries two paths [T] share from the start."""
    shorter = min(len(a), len(b))
    differing = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differing[0]) if len(differing) else shorter

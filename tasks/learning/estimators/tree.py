"""Advantages that follow the tree: a token's credit comes from the leaves that contain it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.learning.estimators import Estimator, Floats, Group
from tasks.learning.estimators.group import group_advantages, joined, mean_by_key, split_like


def prefix_calibrated() -> Estimator:
    """A_{i,t} = mean of the leaves' group-relative advantages over those that contain token t.

    GPG (arXiv 2512.10365, equation 29) and ARPO's hard estimate (arXiv 2507.19849, section 3.2).
    **Chosen**: inclusive, so the prefix goes through a_t. The equation as printed ends before a_t,
    which would give the first token 0, and siblings equal credit on the token where they part.
    **Chosen**: two leaves share a token where ``Episode.tokens`` is equal, by default the tree's
    own lineage; ``token_identities`` makes keys that also merge prefixes equal by accident.
    """

    def estimate(groups: Sequence[Group]) -> list[list[Floats]]:
        return [_prefix_calibrated(group) for group in groups]

    return estimate


def token_identities(paths: Sequence[NDArray[np.integer[Any]]]) -> list[NDArray[np.int64]]:
    """Identities of tokens by the prefix that they end; path -> [its length], of int64.

    ``paths``: the token ids of each leaf after the prompt, observed ones included, in full. Two
    positions of different leaves get the same identity where, and only where, the token ids up to
    and including them are equal. In sorted order a path shares its longest common prefix with the
    one before it, so each path takes over that much and numbers the rest anew.
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


def _prefix_calibrated(group: Group) -> list[Floats]:
    tokens = [leaf.tokens for leaf in group]
    keys_N = np.concatenate([np.zeros(0, np.int64), *tokens])
    advantages_M = group_advantages(group, std=True)
    views = [
        np.full(len(tokens_S), advantage)
        for tokens_S, advantage in zip(tokens, advantages_M, strict=True)
    ]
    return split_like(mean_by_key(joined(views), keys_N), tokens)


def _common_prefix(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    shorter = min(len(a), len(b))
    differing = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differing[0]) if len(differing) else shorter

"""Advantages that follow the tree: a token's credit comes from the leaves that contain it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from params.schema import algorithms
from tasks.learning.estimators import Advantages, Group
from tasks.learning.estimators.group import (
    group_advantages,
    joined,
    mean_by_key,
    on_every_token,
    split_like,
)


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


def _common_prefix(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Return how many entries two paths [T] share from the start."""
    shorter = min(len(a), len(b))
    differing = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differing[0]) if len(differing) else shorter

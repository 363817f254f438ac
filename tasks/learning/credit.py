"""Credit for the leaves of trees: from rewards to an advantage for every sampled token. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from params.schema.algorithms import Algorithm
from tasks.learning.algorithm import assemble
from tasks.learning.estimators import Floats, LeafTrajectory
from tasks.learning.estimators.tree_credit import path_weights, token_identities
from tasks.learning.packing import ByNode, Credit, Credited
from tasks.trees import marks
from tasks.trees.tree import TURN, Tree, observed_before, sampled, step_rewards

DECIMALS = 12  # of the reward at the end; less is rounding of the steps' sum


def credited(
    trees: Sequence[Tree],
    rewards: Sequence[Sequence[float]],
    algorithm: Algorithm,
    response_tokens: int,
    token_texts: Sequence[str],
) -> list[Credited]:
    """Return the trees with the credit that an algorithm without a critic gives their leaves.

    ``rewards``: of each tree's leaves [L]. ``response_tokens``: the budget of a response.
    ``token_texts``: the text of each token of the vocabulary, for marks.
    """
    groups = [episodes_of(*each, algorithm) for each in zip(trees, rewards, strict=True)]
    advantages = assemble(algorithm, response_tokens).estimator(groups)
    return [
        Credited(
            tree,
            [
                Credit(
                    advantages_S.astype(np.float32),
                    np.array(marks.segments(algorithm.marks, trajectory, token_texts), np.int64),
                    weight=weight,
                )
                for advantages_S, trajectory, weight in zip(
                    of_tree, tree.trajectories(), weights(tree, algorithm), strict=True
                )
            ],
        )
        for tree, of_tree in zip(trees, advantages, strict=True)
    ]


def weights(tree: Tree, algorithm: Algorithm) -> list[float]:
    """Return the weight of each leaf in the loss, by what counts once there. [L]"""
    if algorithm.counts == "leaves":
        return [1.0] * len(tree.leaves)
    return path_weights(_identities(tree, "lineage")).tolist()


def episodes_of(
    tree: Tree,
    rewards: Sequence[float],
    algorithm: Algorithm,
    penalty: Sequence[Floats] | None = None,
    values: ByNode | None = None,
    step_weight: float = 1.0,
    parts: Sequence[Mapping[str, float]] | None = None,
) -> list[LeafTrajectory]:
    """Return the leaves of a tree as estimators read them.

    ``rewards``: of the leaves [L], length shaping included; ``parts``: of each leaf, what each part
    of the reward added. ``penalty`` and ``values``: of each
    sampled token, by node. The reward of a step, times ``step_weight``, is given at the last token
    of its turn, the rest of the leaf's reward at the end.
    """
    merged = getattr(algorithm.estimator, "key", None) == "token_ids"
    identities = _identities(tree, "token_ids" if merged else "lineage")
    episodes = []
    for leaf, trajectory in enumerate(tree.trajectories()):
        lengths = [len(turn.tokens) for turn in sampled(trajectory)]
        rewards_of_steps = [step_weight * given for given in step_rewards(trajectory)]
        tokens = identities[leaf]
        charges = along(tree, leaf, penalty) if penalty else np.zeros(len(tokens))
        episodes.append(
            LeafTrajectory(
                reward=_at_the_end(rewards[leaf], rewards_of_steps),
                token_rewards=charges + _at_last_tokens(rewards_of_steps, lengths)
                if any(rewards_of_steps)
                else charges,
                tokens=tokens,
                steps=np.repeat(np.arange(len(lengths)), lengths),
                states=tuple(observed_before(trajectory)),
                values=along(tree, leaf, values) if values else None,
                whole=rewards[leaf] + charges.sum(),
                parts=parts[leaf] if parts else None,
            )
        )
    return episodes


def _at_the_end(reward: float, of_steps: Sequence[float]) -> float:
    """Return what a leaf's reward has beside the rewards of its steps."""
    return round(reward - math.fsum(of_steps), DECIMALS) if any(of_steps) else reward


def _at_last_tokens(of_steps: Sequence[float], lengths: Sequence[int]) -> Floats:
    """Place each step's reward [E] at the last token of its turn, else 0. [S]"""
    rewards_S = np.zeros(sum(lengths))
    rewards_S[np.cumsum(lengths) - 1] = of_steps
    return rewards_S


def along(tree: Tree, leaf: int, by_node: Sequence[NDArray[Any]]) -> Floats:
    """Join the entries of a leaf's turns end to end. [S]"""
    nodes = [node for node in tree.path(tree.leaves[leaf]) if tree.nodes[node].kind == TURN]
    return np.concatenate([by_node[node] for node in nodes]).astype(np.float64)


def _identities(tree: Tree, key: str) -> list[NDArray[np.int64]]:
    """Return ids of each leaf's sampled tokens, equal where leaves share the token. L x [S]

    ``key``: "lineage" (the tree's own sharing) or "token_ids" (equal prefixes of ids share too).
    """
    paths = [tree.path(leaf)[1:] for leaf in tree.leaves]  # without the prompt
    starts = np.concatenate([[0], np.cumsum([len(node.tokens) for node in tree.nodes])])
    masks = [
        np.concatenate(
            [np.full(len(tree.nodes[n].tokens), tree.nodes[n].kind == TURN) for n in path]
        )
        for path in paths
    ]
    by_key = {
        "lineage": lambda: [
            np.concatenate([np.arange(starts[n], starts[n + 1]) for n in path]) for path in paths
        ],
        "token_ids": lambda: token_identities(
            [np.concatenate([tree.nodes[n].tokens for n in path]) for path in paths]
        ),
    }
    return [identities[mask] for identities, mask in zip(by_key[key](), masks, strict=True)]

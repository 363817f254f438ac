"""Numbers about trees and outcomes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tasks.branching import window_entropy
from tasks.trajectory import RESULT, TURN, Node, Tree

PROFILE_BEFORE, PROFILE_AFTER = 10, 20  # tokens around a tool result


def tree_metrics(trees: Sequence[Tree], window: int) -> dict[str, float]:
    """What a batch of rollouts looked like.

    A node that several trajectories share counts once for calls, tokens and entropies. Entropies
    are normalised, in [0, 1]; ``window`` is the number of tokens after a result that are averaged.
    """
    nodes = [node for tree in trees for node in tree.nodes]
    turns = [node for node in nodes if node.kind == TURN]
    results = [node for node in nodes if node.kind == RESULT]
    before, after = around_results(trees)
    leaves = [trajectory for tree in trees for trajectory in tree.trajectories()]
    return {
        "leaves": len(leaves),
        "branches": sum(decision.added for tree in trees for decision in tree.decisions),
        "tool_calls": len(results),
        "tool_errors": sum(node.outcome != "ok" for node in results),
        "tool_calls_a_leaf": _mean([sum(n.kind == RESULT for n in leaf) for leaf in leaves]),
        "sampled_tokens": sum(len(node.tokens) for node in turns),
        "response_tokens": _mean([sum(len(n.tokens) for n in leaf[1:]) for leaf in leaves]),
        "answer_rate": _mean([leaf[-1].outcome == "answer" for leaf in leaves]),
        "entropy": _mean(np.concatenate([turn.entropies for turn in turns])),
        "entropy_before_result": _mean([float(turn.entropies[-window:].mean()) for turn in before]),
        "entropy_after_result": _mean([window_entropy(turn.entropies, window) for turn in after]),
    }


def around_results(trees: Sequence[Tree]) -> tuple[list[Node], list[Node]]:
    """The turns before tool results that a turn follows, and the turns after them; each once.

    Where branches share a result, one turn stands before it and several after.
    """
    before: list[Node] = []
    after: list[Node] = []
    for tree in trees:
        results = [node.parent for node in tree.nodes if node.kind == TURN]
        followed = [r for r in dict.fromkeys(results) if tree.nodes[r].kind == RESULT]
        before += [tree.nodes[tree.nodes[result].parent] for result in followed]
        after += [node for node in tree.nodes if node.kind == TURN and node.parent in set(followed)]
    return before, after


def entropy_profile(trees: Sequence[Tree]) -> list[dict[str, float]]:
    """Mean entropy by token position from a tool result; -1 is the last token before it."""
    values: dict[int, list[float]] = {}
    before, after = around_results(trees)
    for turn in before:
        tail = turn.entropies[-PROFILE_BEFORE:]
        for position, entropy in enumerate(tail, start=-len(tail)):
            values.setdefault(position, []).append(float(entropy))
    for turn in after:
        for position, entropy in enumerate(turn.entropies[:PROFILE_AFTER], start=1):
            values.setdefault(position, []).append(float(entropy))
    return [
        {
            "position": position,
            "mean": _mean(found),
            "standard_error": float(np.std(found) / np.sqrt(len(found))),
        }
        for position, found in sorted(values.items())
    ]


def bootstrap_interval(
    values: NDArray[np.float64], resamples: int, seed: int
) -> tuple[float, float]:
    """A 95 % interval of the mean: percentiles over resamples of the questions (Efron 1979)."""
    draws = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    low, high = np.percentile(values[draws].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def _mean(values: Sequence[float] | NDArray[np.float32]) -> float:
    return float(np.mean(values, dtype=np.float64)) if len(values) else 0.0

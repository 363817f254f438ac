"""Decide where a rollout branches: after tool results (ARPO) or at marks (GPG). Pure.

ARPO, arXiv 2507.19849, section 3.1: a path branches where the entropy of what it samples after a
tool result has risen over that of its start. GPG, arXiv 2512.10365: the first trajectories of a
question branch at the first marks of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from params.schema.reinforce import Rollout
from tasks.trees.metrics import window_entropy
from tasks.trees.tree import AFTER_RESULT, AT_MARK, TURN, Decision, Node


def branch_probability(rise: float, settings: Rollout) -> float:
    """Return P = alpha + beta * (H_t - H_initial), equation 3 of ARPO; not clipped to [0, 1]."""
    return settings.base_probability + settings.entropy_weight * rise


def wants_branch(probability: float, settings: Rollout, uniform: float) -> bool:
    """Decide by P > tau, or with ``draw`` by a coin of probability clip(P, 0, 1).

    ``uniform`` in [0, 1) is drawn from the path's own seed.
    """
    if settings.draw:
        return uniform < min(max(probability, 0.0), 1.0)
    return probability > settings.threshold


def least_rise(settings: Rollout) -> float | None:
    """Return the rise of entropy above which the paper's rule branches, (tau - alpha) / beta.

    None where there is no such value: branches are drawn, or beta is not positive.
    """
    if settings.draw or settings.entropy_weight <= 0:
        return None
    return (settings.threshold - settings.base_probability) / settings.entropy_weight


def decide(
    initial: float,
    following: NDArray[np.float32],
    settings: Rollout,
    uniform: float | None = None,
    **coordinates: Any,
) -> Decision:
    """Apply the rule at a branching point, before the budget limits it (``added`` is 0).

    ``initial`` is H_initial of the trajectory, ``following`` the entropies of the tokens that it
    sampled after the point. With ``uniform`` (see ``wants_branch``) the rule is ARPO's; without,
    the point is a mark, where every trajectory branches. ``coordinates``: node, path and position
    of the decision.
    """
    entropy = window_entropy(following, settings.entropy_window)
    rise = entropy - initial
    probability = branch_probability(rise, settings)
    return Decision(
        kind=AT_MARK if uniform is None else AFTER_RESULT,
        initial_entropy=initial,
        entropy=entropy,
        rise=rise,
        probability=None if uniform is None else probability,
        wanted=uniform is None or wants_branch(probability, settings, uniform),
        added=0,
        **coordinates,
    )


@dataclass(frozen=True)
class Point:
    """A place where a trajectory may branch: after ``tokens`` tokens of its node ``place``."""

    place: int  # of a turn, or of the result that follows one
    tokens: int  # of that node, before the point
    position: int  # tokens of the trajectory before the point, prompt included
    inside: bool  # whether the point is inside a turn; otherwise the node ends here
    entropies: NDArray[np.float32]  # of the next tokens that were sampled, to the end of the turn


def branching_points(trajectory: Sequence[Node], ends: NDArray[np.bool_], most: int) -> list[Point]:
    """Return the points at the first ``most`` marks that have a sampled token after them.

    ``trajectory`` has whole turns; ``ends`` [S] flags the sampled tokens that complete a mark
    (``tasks.trees.marks.ends``). A mark at the end of a turn, such as a tool call, has its point
    after the result.
    """
    turns = [index for index, node in enumerate(trajectory) if node.kind == TURN]
    starts = np.cumsum([0, *(len(node.tokens) for node in trajectory)])
    sampled = np.cumsum([len(trajectory[index].tokens) for index in turns])
    points = []
    for mark in np.flatnonzero(ends[:-1])[:most]:
        turn = int(np.searchsorted(sampled, mark, side="right"))
        index, node = turns[turn], trajectory[turns[turn]]
        tokens = int(mark + 1 - (sampled[turn] - len(node.tokens)))
        inside = tokens < len(node.tokens)
        if not inside:
            index, tokens = index + 1, len(trajectory[index + 1].tokens)
        following = node.entropies[tokens:] if inside else trajectory[index + 1].entropies
        points.append(Point(index, tokens, int(starts[index]) + tokens, inside, following))
    return points

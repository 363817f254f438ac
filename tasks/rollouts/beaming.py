"""Branch paths where the algorithm's row says: after observations (ARPO) or at marks (GPG)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from params.schema.reinforce import Rollout
from tasks.engines import Sample
from tasks.rollouts.branching import Point, branching_points, decide
from tasks.rollouts.paths import NO_TOKENS, Lane, LiveTrajectory, context_tokens, seed_of
from tasks.trees import marks as segment
from tasks.trees.tree import TURN, split

Judged = tuple[
    LiveTrajectory, int, Sample
]  # a path, the observation before its turn, and that turn


def judge(judged: Sequence[Judged], lane: Lane) -> None:
    """Judge each turn after an observation; add branches while the budget lasts."""
    rollout = lane.setting.rollout
    for path, result, sample in judged:
        assert path.initial_entropy is not None
        seed = seed_of(path, "branch", path.turns, lane.setting)
        coin = np.random.Generator(np.random.Philox(seed))
        position = len(path.tokens) - len(sample.tokens)
        decision = decide(
            path.initial_entropy,
            sample.entropies,
            rollout,
            coin.random(),
            node=result,
            path=path.index,
            position=position,
        )
        left = rollout.leaves - len(path.siblings)
        added = min(rollout.branch, left) if decision.wanted else 0
        for _ in range(added):
            lane.fork(path, result, path.tokens[:position], len(path.past), turns=path.turns - 1)
        path.tree.decisions.append(replace(decision, added=added))


def watch(judged: Sequence[Judged], lane: Lane) -> None:
    """Judge and record, but never branch."""
    rollout = lane.setting.rollout.model_copy(update={"branch": 0})
    judge(judged, replace(lane, setting=replace(lane.setting, rollout=rollout)))


def branch_at_marks(waiting: Sequence[LiveTrajectory], lane: Lane) -> None:
    """Branch the ended first trajectories of a tree at their first marks, while the budget lasts.

    Then their rows are given up: a tree branches at marks once, so branches never do.
    """
    setting = lane.setting
    tree, left = waiting[0].tree, setting.rollout.leaves - len(waiting[0].siblings)
    branch_points: list[
        tuple[LiveTrajectory, Point, int, int]
    ] = []  # with the node, and branches to start
    cuts: dict[int, list[int]] = {}
    for path in waiting:
        route = tree.path(path.node)
        for point in _points(path, route, lane):
            node, added = route[point.place], min(setting.rollout.branch, left)
            left -= added
            branch_points.append((path, point, node, added))
            if point.inside and added:
                cuts.setdefault(node, []).append(point.tokens)
    tree.nodes, last = split(tree.nodes, cuts, setting.tokenizer.decode)
    for path in waiting:
        path.node, path.waits = last[path.node], False
    for path, point, node, added in branch_points:
        behind = sum(cut >= point.tokens for cut in cuts.get(node, ()))
        _branch_at(path, point, last[node] - behind, added, lane)
    for path in waiting:
        lane.close(path)


def _points(path: LiveTrajectory, route: Sequence[int], lane: Lane) -> list[Point]:
    """Return the points where an ended trajectory branches."""
    trajectory = [path.tree.nodes[index] for index in route]
    longest = max(int(node.tokens.max(initial=0)) for node in trajectory)
    pieces = segment.token_texts(lane.setting.tokenizer, longest + 1)
    marks = segment.ends(lane.setting.marks, trajectory, pieces)
    return branching_points(trajectory, marks, lane.setting.rollout.marks_per_rollout)


def _branch_at(path: LiveTrajectory, point: Point, node: int, added: int, lane: Lane) -> None:
    """Start branches after ``node``; inside a turn they continue the turn's beginning."""
    tree = path.tree
    *before, last = ([tree.nodes[part] for part in step] for step in tree.steps(node))
    head, done = (last, before) if point.inside else ([], [*before, last])
    acted = [parts[0].kind for parts in done].count(TURN)
    for _ in range(added):
        lane.fork(
            path,
            node,
            context_tokens(tree, node),
            acted,
            turns=acted,
            head=np.concatenate([NO_TOKENS, *(part.tokens for part in head)]),
            head_text="".join(part.text for part in head),
        )
    assert path.initial_entropy is not None
    decision = decide(
        path.initial_entropy,
        point.entropies,
        lane.setting.rollout,
        node=node,
        path=path.index,
        position=point.position,
    )
    tree.decisions.append(replace(decision, added=added))


@dataclass(frozen=True)
class Beaming:
    """The choices that make a kind of branching."""

    initial: Callable[[Rollout], int]  # trajectories that start from the prompt at once
    judge: Callable[[Sequence[Judged], Lane], None]
    at_marks: bool  # the first trajectories wait until all have ended, then branch


BEAMING = {
    "none": Beaming(lambda rollout: rollout.leaves, watch, at_marks=False),
    "marks": Beaming(lambda rollout: rollout.initial, lambda *_: None, at_marks=True),
    "entropy": Beaming(lambda rollout: rollout.initial, judge, at_marks=False),
}

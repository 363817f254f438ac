"""Branch paths where the algorithm's row says: after observations, at marks, or at random."""

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


def branch_at_random(waiting: Sequence[LiveTrajectory], lane: Lane) -> None:
    """Branch ended trajectories after random observations, while the budget lasts.

    In a round each initial rollout gets ``marks_per_rollout`` branches, from any of its paths;
    rounds follow each other until all leaves are there (Tree-GRPO, arXiv 2509.21240: M is
    ``initial``, N ``marks_per_rollout``, L the number of rounds). **Chosen**: places are drawn
    independently, so one may be drawn twice; a rollout without an observation does not branch.
    """
    setting, left = lane.setting, lane.setting.rollout.leaves - len(waiting[0].siblings)
    drawn: list[tuple[LiveTrajectory, int]] = []
    for paths in _of_initial_rollouts(waiting):
        places = [*{node: (path, node) for path in paths for node in _observed(path)}.values()]
        seed = seed_of(paths[0], "branch", len(waiting[0].siblings), setting)
        chance = np.random.Generator(np.random.Philox(seed))
        count = setting.rollout.marks_per_rollout if places else 0
        drawn += [places[chance.integers(len(places))] for _ in range(count)]
    again = 0 < len(drawn) < left  # another round follows, for which all paths wait
    for path, node in drawn[:left]:
        _branch_at(path, _after(path, node), node, 1, lane, waits=again)
    if not again:
        for path in waiting:
            path.waits = False
            lane.close(path)


def _of_initial_rollouts(paths: Sequence[LiveTrajectory]) -> list[list[LiveTrajectory]]:
    """Group paths by the initial rollout that they begin with."""
    groups: dict[int, list[LiveTrajectory]] = {}
    for path in paths:
        groups.setdefault(path.tree.path(path.node)[1], []).append(path)
    return list(groups.values())


def _observed(path: LiveTrajectory) -> list[int]:
    """Return the nodes of an ended path that answer an act, and that it went on from."""
    nodes = path.tree.nodes
    return [node for node in path.tree.path(path.node)[1:-1] if nodes[node].kind != TURN]


def _after(path: LiveTrajectory, node: int) -> Point:
    """Return the point at the end of a node that the path went on from."""
    route = path.tree.path(path.node)
    place, nodes = route.index(node), path.tree.nodes
    position = sum(len(nodes[index].tokens) for index in route[: place + 1])
    length = len(nodes[node].tokens)
    return Point(place, length, position, False, nodes[route[place + 1]].entropies)


def _points(path: LiveTrajectory, route: Sequence[int], lane: Lane) -> list[Point]:
    """Return the points where an ended trajectory branches."""
    trajectory = [path.tree.nodes[index] for index in route]
    longest = max(int(node.tokens.max(initial=0)) for node in trajectory)
    pieces = segment.token_texts(lane.setting.tokenizer, longest + 1)
    marks = segment.ends(lane.setting.marks, trajectory, pieces)
    return branching_points(trajectory, marks, lane.setting.rollout.marks_per_rollout)


def _branch_at(
    path: LiveTrajectory, point: Point, node: int, added: int, lane: Lane, waits: bool = False
) -> None:
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
            waits=waits,
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
    # what branches trajectories that wait until all of their tree have ended; None: none waits
    once_ended: Callable[[Sequence[LiveTrajectory], Lane], None] | None


def ignore(judged: Sequence[Judged], lane: Lane) -> None:
    """Record nothing: branches do not depend on what follows an observation."""


BEAMING = {
    "none": Beaming(lambda rollout: rollout.leaves, watch, None),
    "marks": Beaming(lambda rollout: rollout.initial, ignore, branch_at_marks),
    "entropy": Beaming(lambda rollout: rollout.initial, judge, None),
    "random": Beaming(lambda rollout: rollout.initial, ignore, branch_at_random),
}

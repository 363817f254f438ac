"""A rollout in parts: what outlives a part, and how the next one goes on from there.

Between two parts the policy learns, and a run may be killed. So what a path is, beside its tree, is
stored with the trees: the session that sampled it and its episode have ended. The next part opens
both anew. An engine is given the whole context anyway; in an environment with a state the acts so
far are done again, and what is observed is compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from tasks.dialects.contract import Exchange
from tasks.environments.contract import Session
from tasks.environments.record import differs, same
from tasks.rollouts.paths import Begun, Lane, LiveTrajectory, Setting, context_tokens, shown_first
from tasks.trees.tables import load_trees, save_trees
from tasks.trees.tree import PROMPT, TURN, Call, Observation, Tree, join

PATHS = "paths.json"
CLOSED = -1  # in place of the handles of a path that has ended


@dataclass(frozen=True)
class RestingPath:
    """A LiveTrajectory between two parts: all that it does not share with its tree."""

    node: int
    turns: int
    initial_entropy: float | None
    judged: int | None
    head: list[int]
    head_text: str
    acts: list[list[tuple[Call, Observation]]]  # of each turn that acted
    failed: Observation | None
    live: bool
    waits: bool

    @property
    def is_open(self) -> bool:
        """Return whether it goes on, or branches may start from it."""
        return self.live or self.waits


@dataclass(frozen=True)
class Resting:
    """A tree whose rollout goes on, and its paths in the order in which they were started."""

    tree: Tree
    paths: list[RestingPath]


# ---------------------------------------------------------------- on the disk

_STORED = TypeAdapter(list[list[RestingPath]])


def save_part(grown: Sequence[Sequence[LiveTrajectory]], folder: Path) -> None:
    """Write trees, each given by its paths, and what goes on with them into ``folder``."""
    save_trees([paths[0].tree for paths in grown], folder)
    resting = [[_resting(path) for path in paths] for paths in grown]
    (folder / PATHS).write_text(json.dumps(_STORED.dump_python(resting, mode="json")))


def load_part(folder: Path) -> list[Resting]:
    """Read what ``save_part`` has written."""
    stored = _STORED.validate_python(json.loads((folder / PATHS).read_text()))
    return [Resting(*each) for each in zip(load_trees(folder), stored, strict=True)]


def _resting(path: LiveTrajectory) -> RestingPath:
    return RestingPath(
        node=path.node,
        turns=path.turns,
        initial_entropy=path.initial_entropy,
        judged=path.judged,
        head=path.head.tolist(),
        head_text=path.head_text,
        acts=[
            list(zip(exchange.calls, exchange.observations, strict=True)) for exchange in path.past
        ],
        failed=path.failed,
        live=path.live,
        waits=path.waits,
    )


# ---------------------------------------------------------------- the next part


def begin_again(
    resting: Sequence[Resting], episodes: Session, setting: Setting
) -> list[list[Begun]]:
    """Open an episode for each path that is open, and do its acts so far again.

    Returns the episodes of each tree, each with why it cannot go on: it had failed before, or shows
    something else than it has shown.
    """
    paths = [(one.tree, path) for one in resting for path in one.paths if path.is_open]
    opened = episodes.open([tree.question for tree, _ in paths])
    failed = [
        path.failed
        or _differs(tree.nodes[0].observation, shown_first(tree.question, seen, setting))
        for (tree, path), (_, seen) in zip(paths, opened, strict=True)
    ]
    handles = [handle for handle, _ in opened]
    acts = [[*chain(*path.acts)] if tree.of_world else [] for tree, path in paths]
    for done in zip_longest(*acts):  # a round of all paths
        moving = [i for i, act in enumerate(done) if act and not failed[i]]
        seen = episodes.act([(handles[i], done[i][0]) for i in moving])
        for i, observation in zip(moving, seen, strict=True):
            failed[i] = _differs(done[i][1], observation)
    again = iter(zip(handles, failed, strict=True))
    return [[next(again) for path in one.paths if path.is_open] for one in resting]


def _differs(before: Observation | None, now: Observation | None) -> Observation | None:
    """Return the failure of an episode that shows something else now, or None."""
    if before is None or now is None or same(before, now):
        return None
    return differs(before, now)


def resume(resting: Resting, begun: Sequence[Begun], lane: Lane) -> list[LiveTrajectory]:
    """Return the paths of a tree as they were, with a new session of the engine."""
    again = iter(begun)
    siblings: list[LiveTrajectory] = []
    for path in resting.paths:
        episode, failed = next(again) if path.is_open else (CLOSED, path.failed)
        handle = lane.sampling.open() if path.is_open else CLOSED
        siblings.append(_path(resting.tree, siblings, path, (handle, episode), failed))
    return siblings


def _path(
    tree: Tree,
    siblings: list[LiveTrajectory],
    path: RestingPath,
    handles: tuple[int, int],
    failed: Observation | None,
) -> LiveTrajectory:
    nodes = [tree.nodes[index] for index in tree.path(path.node)]
    taken = [join([tree.nodes[part] for part in step]) for step in tree.steps(path.node)]
    turns = [node for node in taken if node.kind == TURN]
    return LiveTrajectory(
        tree,
        siblings,
        len(siblings),
        path.node,
        *handles,
        context_tokens(tree, path.node),
        response=sum(len(node.tokens) for node in nodes if node.kind != PROMPT),
        calls=sum(map(len, path.acts)),
        turns=path.turns,
        initial_entropy=path.initial_entropy,
        judged=path.judged,
        head=np.array(path.head, np.int32),
        head_text=path.head_text,
        past=tuple(
            Exchange(turn.tokens, turn.text, *zip(*acts, strict=True))
            for turn, acts in zip(turns, path.acts, strict=False)
        ),
        failed=failed,
        live=path.live,
        waits=path.waits,
    )

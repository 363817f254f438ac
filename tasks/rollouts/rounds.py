"""Rollouts in rounds, with branching: from questions to trees.

In a round every live path samples one turn, and all tool calls and acts run side by side. Branching
after observations (ARPO): each path whose turn followed one is judged, in path order; its branches
start in the next round from the position right after that observation. Branching at marks (GPG):
when the first trajectories of a question have all ended, each branches at its first marks, in path
order; a mark inside a turn splits the turn's node. Either way fresh rollouts from the prompt fill
up the budget. No decision depends on time, so a run can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice

from tasks.dialects.contract import Turn
from tasks.engines import Engine
from tasks.environments.contract import Session as Episodes
from tasks.policy.parallel import side_by_side
from tasks.rollouts.beaming import BEAMING, Judged, branch_at_marks
from tasks.rollouts.paths import NO_MARKS, Begun, Lane, Path, Setting, context_of, root
from tasks.rollouts.turns import act, end, take_turn
from tasks.trees.tree import Call, Question, Tree

__all__ = ["NO_MARKS", "Setting", "grow"]


def grow(
    questions: Sequence[Question],
    engine: Engine,
    setting: Setting,
    top_p: float = 1.0,
    advance: Callable[[int], object] = lambda finished: None,
) -> list[Tree]:
    """Roll out every question until each tree has exactly ``leaves`` leaves.

    Without branching all of them start from the prompt; ``initial`` and ``branch`` are not used.
    Questions are rolled out in batches whose paths fit into ``rollout.rows``. ``advance`` is called
    with the number of questions that have just been finished.

    Raises ValueError if the paths of one question do not fit into ``rows``, or a prompt and the
    response budget into the policy's context (checked before the batch is sampled).
    """
    leaves = setting.rollout.leaves
    if setting.rollout.rows < leaves:
        raise ValueError(
            f"rollout.rows {setting.rollout.rows} cannot hold the {leaves} paths of one question: "
            "raise rows, or lower leaves"
        )
    per_batch = setting.rollout.rows // leaves
    waiting = iter(questions)
    trees: list[Tree] = []
    while batch := list(islice(waiting, per_batch)):
        trees += _grow_batch(batch, engine, setting, top_p)
        advance(len(batch))
    return trees


@dataclass
class Planted:
    """Trees that have only their prompts, and the episodes that begin there."""

    trees: list[Tree]
    begun: list[list[Begun]]  # of each tree
    episodes: Episodes


def _grow_batch(
    questions: Sequence[Question], engine: Engine, setting: Setting, top_p: float
) -> list[Tree]:
    """Grow the trees of some questions in the engine's replicas, each with a session of its own."""
    engines = engine.replicas(len(questions))
    count = len(engines)
    pieces = [questions[lane::count] for lane in range(count)]
    with ExitStack() as stack:
        sessions = [stack.enter_context(setting.environment.session()) for _ in pieces]
        planted = side_by_side(
            lambda lane: _plant(pieces[lane], sessions[lane], setting), range(count)
        )
        context = context_of([tree for piece in planted for tree in piece.trees], setting.dialogue)
        lanes = [
            Lane(
                stack.enter_context(
                    replica.session(
                        len(piece.trees) * setting.rollout.leaves,
                        context,
                        setting.rollout.temperature,
                        top_p,
                        setting.dialect.stop_strings,
                    )
                ),
                piece.episodes,
                setting,
                context,
            )
            for replica, piece in zip(engines, planted, strict=True)
        ]
        side_by_side(lambda lane: _grow_piece(planted[lane], lanes[lane]), range(count))
    grown: list[Tree | None] = [None] * len(questions)
    for lane, piece in enumerate(planted):
        grown[lane::count] = piece.trees
    return [tree for tree in grown if tree is not None]


def _plant(questions: Sequence[Question], episodes: Episodes, setting: Setting) -> Planted:
    """Begin the first episodes of each question, and write the prompts."""
    initial = BEAMING[setting.branching].initial(setting.rollout)
    begun = iter(episodes.open([question for question in questions for _ in range(initial)]))
    of_trees = [list(islice(begun, initial)) for _ in questions]
    trees = [
        root(question, first, setting) for question, first in zip(questions, of_trees, strict=True)
    ]
    return Planted(trees, of_trees, episodes)


def _grow_piece(planted: Planted, lane: Lane) -> None:
    """Grow trees that have only their prompts."""
    paths: list[list[Path]] = [[] for _ in planted.trees]
    waits = BEAMING[lane.setting.branching].at_marks
    for tree, begun, siblings in zip(planted.trees, planted.begun, paths, strict=True):
        lane.start(tree, siblings, begun, waits)
    while live := [path for siblings in paths for path in siblings if path.live]:
        _round(live, lane)
        for siblings in paths:
            if not any(path.live for path in siblings):
                _continue(siblings, lane)
    for tree, siblings in zip(planted.trees, paths, strict=True):
        tree.leaves = [path.node for path in siblings]


def _continue(siblings: list[Path], lane: Lane) -> None:
    """Branch at marks that wait, else start more paths, once all paths of a tree have ended."""
    if waiting := [path for path in siblings if path.waits]:
        branch_at_marks(waiting, lane)
    if not any(path.live for path in siblings):
        tree, missing = siblings[0].tree, lane.setting.rollout.leaves - len(siblings)
        begun = lane.episodes.open([tree.question] * missing) if missing else []
        lane.start(tree, siblings, begun, waits=False)


def _round(live: Sequence[Path], lane: Lane) -> None:
    """Sample one turn of every live path, run all calls, and decide on branches."""
    samples = lane.sampling.sample([lane.request(path) for path in live])
    calls: list[tuple[Path, Call]] = []
    judged: list[Judged] = []
    turns: list[tuple[Path, Turn]] = []
    for path, sample in zip(live, samples, strict=True):
        if path.judged is not None:
            judged.append((path, path.judged, sample))
        turn = take_turn(path, sample, lane)
        turns.append((path, turn))
        if turn.call:
            calls.append((path, turn.call))
    BEAMING[lane.setting.branching].judge(judged, lane)
    act(calls, lane)
    end([(path, turn) for path, turn in turns if not path.live], lane)
    for path in live:
        if not path.live and not path.waits:
            lane.close(path)

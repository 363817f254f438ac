"""Rollouts in rounds, with branching: from questions to trees.

In a round every live path samples one turn, and the tool calls and acts of all paths run side by
side, those of one turn one after the other. Branching
after observations (ARPO): each path whose turn followed one is judged, in path order; its branches
start in the next round from the position right after that observation. Branching at marks (GPG):
when the first trajectories of a question have all ended, each branches at its first marks, in path
order; a mark inside a turn splits the turn's node. Either way fresh rollouts from the prompt fill
up the budget. No decision depends on time, so a run can be repeated.

A rollout may rest after some rounds, while the policy learns, and go on later (rollout_parts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice, repeat

from tasks.dialects.contract import Turn
from tasks.engines import Engine
from tasks.environments.contract import Session
from tasks.policy.parallel import side_by_side
from tasks.rollouts.beaming import BEAMING, Judged
from tasks.rollouts.paths import NO_MARKS, Begun, Lane, LiveTrajectory, Setting, context_of, root
from tasks.rollouts.rollout_parts import Resting, begin_again, resume
from tasks.rollouts.turn_taking import act, end, take_turn
from tasks.trees.tree import Call, Question, Tree

__all__ = ["NO_MARKS", "Setting", "grow", "grow_part"]


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
    return [paths[0].tree for paths in grow_part(questions, engine, setting, top_p, None, advance)]


def grow_part(
    begun: Sequence[Question | Resting],
    engine: Engine,
    setting: Setting,
    top_p: float,
    turns: int | None,
    advance: Callable[[int], object] = lambda finished: None,
) -> list[list[LiveTrajectory]]:
    """Grow trees from their questions on, or from where they rest, by at most so many turns a path.

    All of ``begun`` are of one kind; ``turns`` None: to the end. Returns the paths of each tree.
    Raises ValueError as ``grow``.
    """
    leaves = setting.rollout.leaves
    if setting.rollout.rows < leaves:
        raise ValueError(
            f"rollout.rows {setting.rollout.rows} cannot hold the {leaves} paths of one question: "
            "raise rows, or lower leaves"
        )
    per_batch = setting.rollout.rows // leaves
    waiting = iter(begun)
    grown: list[list[LiveTrajectory]] = []
    while batch := list(islice(waiting, per_batch)):
        grown += _grow_batch(batch, engine, setting, top_p, turns)
        advance(len(batch))
    return grown


@dataclass
class Planted:
    """Trees that have only their prompts, or that rest, and the episodes that begin there."""

    trees: list[Tree]
    begun: list[list[Begun]]  # of each tree
    episodes: Session
    resting: list[Resting]  # of each tree that rests


def _grow_batch(
    begun: Sequence[Question | Resting],
    engine: Engine,
    setting: Setting,
    top_p: float,
    turns: int | None,
) -> list[list[LiveTrajectory]]:
    """Grow some trees in the engine's replicas, each with a session of its own."""
    engines = engine.replicas(len(begun))
    count = len(engines)
    pieces = [begun[lane::count] for lane in range(count)]
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
        of_lanes = side_by_side(
            lambda lane: _grow_piece(planted[lane], lanes[lane], turns), range(count)
        )
    grown: list[list[LiveTrajectory]] = [[]] * len(begun)
    for lane, paths in enumerate(of_lanes):
        grown[lane::count] = paths
    return grown


def _plant(begun: Sequence[Question | Resting], episodes: Session, setting: Setting) -> Planted:
    """Begin the first episodes of each question and write the prompts; or begin again."""
    resting = [one for one in begun if isinstance(one, Resting)]
    if resting:
        trees = [one.tree for one in resting]
        return Planted(trees, begin_again(resting, episodes, setting), episodes, resting)
    questions = [one for one in begun if isinstance(one, Question)]
    initial = BEAMING[setting.branching].initial(setting.rollout)
    opened = iter(episodes.open([question for question in questions for _ in range(initial)]))
    of_trees = [list(islice(opened, initial)) for _ in questions]
    trees = [
        root(question, first, setting) for question, first in zip(questions, of_trees, strict=True)
    ]
    return Planted(trees, of_trees, episodes, [])


def _grow_piece(planted: Planted, lane: Lane, turns: int | None) -> list[list[LiveTrajectory]]:
    """Grow trees by so many rounds, None: to their ends; return the paths of each."""
    paths = _first_paths(planted, lane)
    for _ in repeat(None) if turns is None else range(turns):
        live = [path for siblings in paths for path in siblings if path.live]
        if not live:
            break
        _round(live, lane)
        for siblings in paths:
            if not any(path.live for path in siblings):
                _continue(siblings, lane)
    for tree, siblings in zip(planted.trees, paths, strict=True):
        tree.leaves = [path.node for path in siblings]
        for path in siblings:
            if path.live or path.waits:
                lane.close(path)
    return paths


def _first_paths(planted: Planted, lane: Lane) -> list[list[LiveTrajectory]]:
    """Start the first paths of each tree, or resume those of trees that rest."""
    if planted.resting:
        pairs = zip(planted.resting, planted.begun, strict=True)
        return [resume(resting, begun, lane) for resting, begun in pairs]
    paths: list[list[LiveTrajectory]] = [[] for _ in planted.trees]
    waits = BEAMING[lane.setting.branching].once_ended is not None
    for tree, begun, siblings in zip(planted.trees, planted.begun, paths, strict=True):
        lane.start(tree, siblings, begun, waits)
    return paths


def _continue(siblings: list[LiveTrajectory], lane: Lane) -> None:
    """Branch paths that wait, else start more, once all paths of a tree have ended."""
    branch = BEAMING[lane.setting.branching].once_ended
    if branch and (waiting := [path for path in siblings if path.waits]):
        branch(waiting, lane)
    if not any(path.live for path in siblings):
        tree, missing = siblings[0].tree, lane.setting.rollout.leaves - len(siblings)
        begun = lane.episodes.open([tree.question] * missing) if missing else []
        lane.start(tree, siblings, begun, waits=False)


def _round(live: Sequence[LiveTrajectory], lane: Lane) -> None:
    """Sample one turn of every live path, run all calls, and decide on branches."""
    samples = lane.sampling.sample([lane.request(path) for path in live])
    calls: list[tuple[LiveTrajectory, Sequence[Call]]] = []
    judged: list[Judged] = []
    turns: list[tuple[LiveTrajectory, Turn]] = []
    for path, sample in zip(live, samples, strict=True):
        if path.judged is not None:
            judged.append((path, path.judged, sample))
        turn = take_turn(path, sample, lane)
        turns.append((path, turn))
        if turn.calls:
            calls.append((path, turn.calls))
    BEAMING[lane.setting.branching].judge(judged, lane)
    act(calls, lane)
    end([(path, turn) for path, turn in turns if not path.live], lane)
    for path in live:
        if not path.live and not path.waits:
            lane.close(path)

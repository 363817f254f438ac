"""Rollouts in rounds, with branching: from questions to trees.

In a round every live path samples one turn, and all tool calls run side by side. Branching after
tool results (ARPO): each path whose turn followed a result is judged, in path order; its branches
start in the next round from the position right after that result. Branching at marks (GPG): when
the first trajectories of a question have all ended, each branches at its first marks, in path
order; a mark inside a turn splits the turn's node. Either way fresh rollouts from the prompt fill
up the budget. No decision depends on time, so a run can be repeated.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from params.schema.agent import Dialogue
from params.schema.algorithms import Marks
from params.schema.reinforce import Rollout
from tasks.engines import Engine, Request, Sample, Session
from tasks.environments import Respond
from tasks.policy.parallel import side_by_side
from tasks.rollouts.branching import Point, branching_points, decide
from tasks.trees import dialogue as talk
from tasks.trees import marks as segment
from tasks.trees.metrics import window_entropy
from tasks.trees.outcomes import Outcome, StopReason
from tasks.trees.tree import (
    PROMPT,
    RESULT,
    TURN,
    Call,
    Node,
    Observation,
    Question,
    Tree,
    common_prefix,
    split,
)

NOTHING: NDArray[np.float32] = np.zeros(0, np.float32)
NO_MARKS = Marks(kind="none")
NO_TOKENS: NDArray[np.int32] = np.zeros(0, np.int32)


@dataclass
class Path:
    """One trajectory while it grows."""

    tree: Tree
    siblings: list[Path]  # all paths of the tree, in the order they were started
    index: int  # its own place there
    node: int  # the node that its next turn follows
    handle: int  # of the engine's session
    tokens: NDArray[np.int32]  # prompt and all nodes up to ``node``
    calls: int = 0
    turns: int = 0
    initial_entropy: float | None = None  # of its first turn; a branch inherits its parent's
    judged: int | None = None  # the tool result before a turn that is not judged yet
    # beginning of its next turn, shared with its parent's
    head: NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS)
    head_text: str = ""
    live: bool = True
    waits: bool = False  # keeps its handle after its end, since it may branch at marks


@dataclass(frozen=True)
class Setting:
    """What all rollouts of one call share."""

    tokenizer: Any
    dialogue: Dialogue
    rollout: Rollout
    respond: Respond
    seed: str  # of this batch: run seed and iteration
    branching: str = "none"  # none, marks, entropy: of a row of params/algorithms.yaml
    marks: Marks = NO_MARKS  # where trajectories may branch, if at marks


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


def _grow_batch(
    questions: Sequence[Question], engine: Engine, setting: Setting, top_p: float
) -> list[Tree]:
    """Grow the trees of some questions in the engine's replicas, each with a session of its own."""
    trees = [_root(question, setting) for question in questions]
    longest_prompt = max(len(tree.nodes[0].tokens) for tree in trees)
    context = longest_prompt + setting.dialogue.response_tokens
    rollout = setting.rollout
    engines = engine.replicas(len(trees))
    count = len(engines)
    pieces = [trees[lane::count] for lane in range(count)]
    stop = talk.stop_strings(setting.tokenizer)
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(
                lane.session(
                    len(piece) * rollout.leaves,
                    context,
                    rollout.temperature,
                    top_p,
                    stop,
                )
            )
            for lane, piece in zip(engines, pieces, strict=True)
        ]
        side_by_side(lambda lane: _grow_piece(pieces[lane], sessions[lane], setting), range(count))
    return trees


def _grow_piece(trees: Sequence[Tree], session: Session, setting: Setting) -> None:
    """Grow trees that have only their prompts."""
    paths: list[list[Path]] = [[] for _ in trees]
    beaming = BEAMING[setting.branching]
    initial = beaming.initial(setting.rollout)
    for tree, siblings in zip(trees, paths, strict=True):
        _start(tree, siblings, initial, session, waits=beaming.at_marks)
    while live := [path for siblings in paths for path in siblings if path.live]:
        _round(live, session, setting)
        for siblings in paths:
            if not any(path.live for path in siblings):
                _go_on(siblings, session, setting)
    for tree, siblings in zip(trees, paths, strict=True):
        tree.leaves = [path.node for path in siblings]


def _root(question: Question, setting: Setting) -> Tree:
    tokens = talk.prompt_tokens(setting.tokenizer, setting.dialogue, question)
    return Tree(question, [Node(-1, PROMPT, "", question.text, tokens, NOTHING, NOTHING)])


def _start(
    tree: Tree, siblings: list[Path], count: int, session: Session, waits: bool = False
) -> None:
    """Start ``count`` trajectories at the prompt."""
    prompt = tree.nodes[0].tokens
    for _ in range(count):
        siblings.append(Path(tree, siblings, len(siblings), 0, session.open(), prompt, waits=waits))


def _go_on(siblings: list[Path], session: Session, setting: Setting) -> None:
    """Branch at marks that wait, else start more paths, once all paths of a tree have ended."""
    if waiting := [path for path in siblings if path.waits]:
        _branch_at_marks(waiting, session, setting)
    if not any(path.live for path in siblings):
        missing = setting.rollout.leaves - len(siblings)
        _start(siblings[0].tree, siblings, missing, session)


def _round(live: Sequence[Path], session: Session, setting: Setting) -> None:
    """Sample one turn of every live path, run all tool calls, and decide on branches."""
    samples = session.sample([_request(path, setting) for path in live])
    calls: list[tuple[Path, Call]] = []
    judged: list[tuple[Path, int, Sample]] = []
    for path, sample in zip(live, samples, strict=True):
        if path.judged is not None:
            judged.append((path, path.judged, sample))
        call = _take_turn(path, sample, setting)
        if call:
            calls.append((path, call))
    BEAMING[setting.branching].judge(judged, session, setting)
    observations = setting.respond([call for _, call in calls])
    for (path, _), observation in zip(calls, observations, strict=True):
        _observe(path, observation, setting)
    for path in live:
        if not path.live and not path.waits:
            session.close(path.handle)


def _request(path: Path, setting: Setting) -> Request:
    left = setting.dialogue.turn_tokens - len(path.head)
    seed = _seed(path, "turn", path.turns, setting)
    return Request(path.handle, path.tokens, seed, min(left, _room(path, setting.dialogue)))


def _room(path: Path, dialogue: Dialogue) -> int:
    """Return the tokens that are left of the path's response budget."""
    return dialogue.response_tokens - (len(path.tokens) - len(path.tree.nodes[0].tokens))


def _seed(path: Path, purpose: str, count: int, setting: Setting) -> int:
    """Return the seed of a draw: from run, iteration, question, path, and number of the draw."""
    words = (setting.seed, path.tree.question.id, str(path.index), purpose, str(count))
    return int.from_bytes(hashlib.blake2b("/".join(words).encode(), digest_size=8).digest())


def _take_turn(path: Path, sample: Sample, setting: Setting) -> Call | None:
    """Append a sampled turn; return its tool call if it ends with one that is allowed."""
    text, sample = _new_text(path, sample, setting)
    said = path.head_text + text
    if sample.stopped == StopReason.END:
        said = said.removesuffix(setting.tokenizer.eos_token)
    outcome, call = talk.read_turn(said, sample.stopped, talk.forged(setting.tokenizer))
    if call and path.calls >= setting.dialogue.tool_calls:
        outcome, call = Outcome.TOO_MANY_CALLS, None
    _append(path, TURN, outcome, text, sample.tokens, sample.logprobs, sample.entropies)
    path.turns += 1
    path.head, path.head_text = NO_TOKENS, ""
    if path.initial_entropy is None:
        path.initial_entropy = window_entropy(sample.entropies, setting.rollout.entropy_window)
    path.live = call is not None
    return call


def _new_text(path: Path, sample: Sample, setting: Setting) -> tuple[str, Sample]:
    """Return the text that a sample adds to its turn, and the sample, cut at the turn's end.

    An engine looks for stop strings in what it samples. One that began in the head shows here.
    """
    if not len(path.head):
        return setting.tokenizer.decode(sample.tokens), sample
    tokens = np.concatenate([path.head, sample.tokens])
    pieces = segment.token_texts(setting.tokenizer, int(tokens.max()) + 1)
    mark = "|".join(map(re.escape, talk.stop_strings(setting.tokenizer)))
    stops = segment.completed(re.compile(mark), [pieces[token] for token in tokens])
    if len(stops):
        tokens = tokens[: stops[0] + 1]
        end = len(tokens) - len(path.head)
        sample = Sample(
            tokens[-end:], sample.logprobs[:end], sample.entropies[:end], StopReason.STOP
        )
    whole = setting.tokenizer.decode(tokens)
    return whole[common_prefix(path.head_text, whole) :], sample


def _append(
    path: Path,
    kind: str,
    outcome: str,
    text: str,
    tokens: NDArray[np.int32],
    logprobs: NDArray[np.float32] = NOTHING,
    entropies: NDArray[np.float32] = NOTHING,
) -> None:
    nodes = path.tree.nodes
    nodes.append(Node(path.node, kind, outcome, text, tokens, logprobs, entropies))
    path.node = len(nodes) - 1
    path.tokens = np.concatenate([path.tokens, tokens])


def _observe(path: Path, observation: Observation, setting: Setting) -> None:
    """Append a tool result; end a path without room for it and one more token."""
    limit = min(setting.dialogue.result_tokens, _room(path, setting.dialogue) - 1)
    text, tokens = talk.result_tokens(setting.tokenizer, observation, limit)
    if len(tokens) > limit:
        path.live = False
        turn = path.tree.nodes[path.node]
        path.tree.nodes[path.node] = replace(turn, outcome=Outcome.OUT_OF_SPACE)
        return
    _append(path, RESULT, observation.outcome, text, tokens)
    path.calls += 1
    path.judged = path.node


def _judge(judged: Sequence[tuple[Path, int, Sample]], session: Session, setting: Setting) -> None:
    """Judge each turn after a tool result; add branches while the budget lasts."""
    rollout = setting.rollout
    for path, result, sample in judged:
        assert path.initial_entropy is not None
        coin = np.random.Generator(np.random.Philox(_seed(path, "branch", path.turns, setting)))
        decision = decide(
            path.initial_entropy,
            sample.entropies,
            rollout,
            coin.random(),
            node=result,
            path=path.index,
            position=len(path.tokens) - len(sample.tokens),
        )
        left = rollout.leaves - len(path.siblings)
        added = min(rollout.branch, left) if decision.wanted else 0
        for _ in range(added):
            _fork(path, result, decision.position, session, turns=path.turns - 1)
        path.tree.decisions.append(replace(decision, added=added))


def _fork(path: Path, node: int, position: int, session: Session, **own: Any) -> None:
    """Start a path that shares its first ``position`` tokens, up to ``node``, with ``path``.

    The decision belongs to the position, so the branch's own first turn is not judged again.
    ``own``: what else differs from the path.
    """
    branch = replace(
        path,
        index=len(path.siblings),
        node=node,
        handle=session.fork(path.handle),
        tokens=path.tokens[:position],
        judged=None,
        live=True,
        **own,
    )
    path.siblings.append(branch)


def _branch_at_marks(waiting: Sequence[Path], session: Session, setting: Setting) -> None:
    """Branch the ended first trajectories of a tree at their first marks, while the budget lasts.

    Then their rows are given up: a tree branches at marks once, so branches never do.
    """
    tree, left = waiting[0].tree, setting.rollout.leaves - len(waiting[0].siblings)
    chosen: list[tuple[Path, Point, int, int]] = []  # with the node, and branches to start
    cuts: dict[int, list[int]] = {}
    for path in waiting:
        route = tree.path(path.node)
        for point in _points(path, route, setting):
            node, added = route[point.place], min(setting.rollout.branch, left)
            left -= added
            chosen.append((path, point, node, added))
            if point.inside and added:
                cuts.setdefault(node, []).append(point.tokens)
    tree.nodes, last = split(tree.nodes, cuts, setting.tokenizer.decode)
    for path in waiting:
        path.node, path.waits = last[path.node], False
    for path, point, node, added in chosen:
        behind = sum(cut >= point.tokens for cut in cuts.get(node, ()))
        _branch_at(path, point, last[node] - behind, added, session, setting.rollout)
    for path in waiting:
        session.close(path.handle)


def _points(path: Path, route: Sequence[int], setting: Setting) -> list[Point]:
    """Return the points where an ended trajectory branches."""
    trajectory = [path.tree.nodes[index] for index in route]
    pieces = segment.token_texts(setting.tokenizer, int(path.tokens.max()) + 1)
    marks = segment.ends(setting.marks, trajectory, pieces)
    return branching_points(trajectory, marks, setting.rollout.marks_per_rollout)


def _branch_at(
    path: Path, point: Point, node: int, added: int, session: Session, rollout: Rollout
) -> None:
    """Start branches after ``node``; inside a turn they continue the turn's beginning."""
    tree = path.tree
    *before, last = ([tree.nodes[part] for part in step] for step in tree.steps(node))
    head, done = (last, before) if point.inside else ([], [*before, last])
    kinds = [parts[0].kind for parts in done]
    for _ in range(added):
        _fork(
            path,
            node,
            point.position,
            session,
            calls=kinds.count(RESULT),
            turns=kinds.count(TURN),
            head=np.concatenate([NO_TOKENS, *(part.tokens for part in head)]),
            head_text="".join(part.text for part in head),
        )
    assert path.initial_entropy is not None
    decision = decide(
        path.initial_entropy,
        point.entropies,
        rollout,
        node=node,
        path=path.index,
        position=point.position,
    )
    tree.decisions.append(replace(decision, added=added))


@dataclass(frozen=True)
class Beaming:
    """The choices that make a kind of branching."""

    initial: Callable[[Rollout], int]  # trajectories that start from the prompt at once
    judge: Callable[[Sequence[tuple[Path, int, Sample]], Session, Setting], None]
    at_marks: bool  # the first trajectories wait until all have ended, then branch


def _watch(judged: Sequence[tuple[Path, int, Sample]], session: Session, setting: Setting) -> None:
    """Judge and record, but never branch."""
    rollout = setting.rollout.model_copy(update={"branch": 0})
    _judge(judged, session, replace(setting, rollout=rollout))


BEAMING = {
    "none": Beaming(lambda rollout: rollout.leaves, _watch, at_marks=False),
    "marks": Beaming(lambda rollout: rollout.initial, lambda *_: None, at_marks=True),
    "entropy": Beaming(lambda rollout: rollout.initial, _judge, at_marks=False),
}

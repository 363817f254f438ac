"""Rollouts in rounds, with branching: from questions to trees (algorithms section 2).

In a round every live path samples one turn, all tool calls run side by side, and each path whose
turn followed a tool result is judged, in path order; its branches start in the next round from the
position right after that result. No decision depends on time, so a run can be repeated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from params.schema import Dialogue, Rollout
from tasks import dialogue as talk
from tasks.branching import branch_probability, wants_branch, window_entropy
from tasks.engines import Engine, Request, Sample, Session
from tasks.toolbox import Respond
from tasks.trajectory import (
    PROMPT,
    RESULT,
    TURN,
    Call,
    Decision,
    Node,
    Observation,
    Question,
    Tree,
)

NOTHING: NDArray[np.float32] = np.zeros(0, np.float32)


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
    judged: int | None = None  # the tool result whose following turn is still to be judged
    live: bool = True


@dataclass(frozen=True)
class Setting:
    """What all rollouts of one call share."""

    tokenizer: Any
    dialogue: Dialogue
    rollout: Rollout
    respond: Respond
    seed: str  # of this batch: run seed and iteration


def grow(
    questions: Sequence[Question],
    engine: Engine,
    setting: Setting,
    top_p: float = 1.0,
    advance: Callable[[int], object] = lambda finished: None,
) -> list[Tree]:
    """Roll out every question until each tree has exactly ``leaves`` leaves.

    Questions go in batches whose paths fit into ``rollout.rows``. ``advance`` is told how many
    questions have been finished, for a progress bar.

    Raises ValueError if the paths of one question do not fit into ``rows``, or a prompt and the
    response budget into the policy's context (checked before anything of the batch is sampled).
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
    trees = [_root(question, setting) for question in questions]
    paths: list[list[Path]] = [[] for _ in trees]
    longest_prompt = max(len(tree.nodes[0].tokens) for tree in trees)
    context = longest_prompt + setting.dialogue.response_tokens
    rollout = setting.rollout
    with engine.session(
        len(questions) * rollout.leaves, context, rollout.temperature, top_p, talk.STOP_STRINGS
    ) as session:
        for tree, siblings in zip(trees, paths, strict=True):
            _start(tree, siblings, rollout.initial, session)
        while live := [path for siblings in paths for path in siblings if path.live]:
            _round(live, session, setting)
            for tree, siblings in zip(trees, paths, strict=True):
                if not any(path.live for path in siblings):
                    _start(tree, siblings, rollout.leaves - len(siblings), session)
    for tree, siblings in zip(trees, paths, strict=True):
        tree.leaves = [path.node for path in siblings]
    return trees


def _root(question: Question, setting: Setting) -> Tree:
    tokens = talk.prompt_tokens(setting.tokenizer, setting.dialogue, question)
    return Tree(question, [Node(-1, PROMPT, "", question.text, tokens, NOTHING, NOTHING)])


def _start(tree: Tree, siblings: list[Path], count: int, session: Session) -> None:
    """Begin ``count`` trajectories at the prompt."""
    prompt = tree.nodes[0].tokens
    for _ in range(count):
        siblings.append(Path(tree, siblings, len(siblings), 0, session.open(), prompt))


def _round(live: Sequence[Path], session: Session, setting: Setting) -> None:
    """One turn of every live path, the tool calls of all, and the branching decisions."""
    samples = session.sample([_request(path, setting) for path in live])
    calls: list[tuple[Path, Call]] = []
    judged: list[tuple[Path, int, Sample]] = []
    for path, sample in zip(live, samples, strict=True):
        if path.judged is not None:
            judged.append((path, path.judged, sample))
        call = _take_turn(path, sample, setting)
        if call:
            calls.append((path, call))
    _branch(judged, session, setting)
    observations = setting.respond([call for _, call in calls])
    for (path, _), observation in zip(calls, observations, strict=True):
        _observe(path, observation, setting)
    for path in live:
        if not path.live:
            session.close(path.handle)


def _request(path: Path, setting: Setting) -> Request:
    room = _room(path, setting.dialogue)
    seed = _seed(path, "turn", path.turns, setting)
    return Request(path.handle, path.tokens, seed, min(setting.dialogue.turn_tokens, room))


def _room(path: Path, dialogue: Dialogue) -> int:
    """Tokens that the path's response may still grow by."""
    return dialogue.response_tokens - (len(path.tokens) - len(path.tree.nodes[0].tokens))


def _seed(path: Path, purpose: str, count: int, setting: Setting) -> int:
    """A counter-based seed: run, iteration, question, path, and which draw of the path."""
    words = (setting.seed, path.tree.question.id, str(path.index), purpose, str(count))
    return int.from_bytes(hashlib.blake2b("/".join(words).encode(), digest_size=8).digest())


def _take_turn(path: Path, sample: Sample, setting: Setting) -> Call | None:
    """Append a sampled turn; the tool call to run, if it ended with one that is allowed."""
    text = setting.tokenizer.decode(sample.tokens)
    outcome, call = talk.read_turn(text, sample.stopped)
    if call and path.calls >= setting.dialogue.tool_calls:
        outcome, call = talk.TOO_MANY_CALLS, None
    _append(path, TURN, outcome, text, sample.tokens, sample.logprobs, sample.entropies)
    path.turns += 1
    if path.initial_entropy is None:
        path.initial_entropy = window_entropy(sample.entropies, setting.rollout.entropy_window)
    path.live = call is not None
    return call


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
    """Append a tool result; a path that has no room left for it and one more token ends."""
    limit = min(setting.dialogue.result_tokens, _room(path, setting.dialogue) - 1)
    text, tokens = talk.result_tokens(setting.tokenizer, observation, limit)
    if len(tokens) > limit:
        path.live = False
        turn = path.tree.nodes[path.node]
        path.tree.nodes[path.node] = replace(turn, outcome=talk.OUT_OF_SPACE)
        return
    _append(path, RESULT, observation.outcome, text, tokens)
    path.calls += 1
    path.judged = path.node


def _branch(judged: Sequence[tuple[Path, int, Sample]], session: Session, setting: Setting) -> None:
    """Judge each turn that followed a tool result; add branches while the budget lasts."""
    rollout = setting.rollout
    for path, result, sample in judged:
        assert path.initial_entropy is not None
        entropy = window_entropy(sample.entropies, rollout.entropy_window)
        probability = branch_probability(
            path.initial_entropy, entropy, rollout.base_probability, rollout.entropy_weight
        )
        coin = np.random.Generator(np.random.Philox(_seed(path, "branch", path.turns, setting)))
        left = rollout.leaves - len(path.siblings)
        added = min(rollout.branch, left)
        if not wants_branch(probability, rollout, coin.random()):
            added = 0
        for _ in range(added):
            _fork(path, result, len(sample.tokens), session)
        path.tree.decisions.append(
            Decision(result, path.index, path.initial_entropy, entropy, probability, added)
        )


def _fork(path: Path, result: int, turn_tokens: int, session: Session) -> None:
    """A new path that shares everything up to the tool result ``result`` with ``path``.

    The decision belongs to the position, so the branch's own first turn is not judged again.
    """
    branch = replace(
        path,
        index=len(path.siblings),
        node=result,
        handle=session.fork(path.handle),
        tokens=path.tokens[: len(path.tokens) - turn_tokens],
        turns=path.turns - 1,
        judged=None,
        live=True,
    )
    path.siblings.append(branch)

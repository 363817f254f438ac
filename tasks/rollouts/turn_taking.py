"""One round of a path: read the turn that it has sampled, act, and append what answers its acts.

The calls of a turn are carried out in their order, each with a result of its own. If fewer calls
are left than were made, the first ones are carried out, and the turn ends the path.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tasks.dialects.contract import Exchange, Turn, numbered, observed, takes_several
from tasks.dialects.observation_text import shown_text
from tasks.engines import Sample
from tasks.rollouts.paths import NO_TOKENS, NOTHING, Lane, LiveTrajectory, Setting
from tasks.trees import dialogue as talk
from tasks.trees import marks as segment
from tasks.trees.metrics import window_entropy
from tasks.trees.outcomes import ENDED_BY_WORLD, Outcome, StopReason
from tasks.trees.tree import (
    PROMPT,
    RESULT,
    TURN,
    Call,
    CallResult,
    Node,
    Observation,
    common_prefix,
    join,
    note_experts,
)

ENDED = (Outcome.ANSWER, Outcome.NO_ANSWER)  # of a turn with which the agent itself stops acting


def take_turn(path: LiveTrajectory, sample: Sample, lane: Lane) -> Turn:
    """Append a sampled turn; return it as read, with those of its calls that are allowed."""
    setting = lane.setting
    text, sample = _new_text(path, sample, lane)
    said = path.head_text + text
    if sample.stopped == StopReason.END:
        said = said.removesuffix(setting.tokenizer.eos_token)
    before = path.tokens[: len(path.tokens) - len(path.head)]
    whole = np.concatenate([path.head, sample.tokens])
    turn = _allowed(path, setting.dialect.read(before, whole, said, sample.stopped), setting)
    measured = (sample.tokens, sample.logprobs, sample.entropies)
    steps = setting.policy_steps
    _append(path, Node(path.node, TURN, turn.outcome, text, *measured, policy_steps=steps))
    note_experts(path.tree, path.node, sample.experts)
    path.turns += 1
    path.head, path.head_text = NO_TOKENS, ""
    if path.initial_entropy is None:
        path.initial_entropy = window_entropy(sample.entropies, setting.rollout.entropy_window)
    path.live = bool(turn.calls) and turn.outcome != Outcome.TOO_MANY_CALLS
    return turn


def _allowed(path: LiveTrajectory, turn: Turn, setting: Setting) -> Turn:
    """Return a turn with those of its calls that the path has left, each with its id."""
    if len(turn.calls) > 1 and not takes_several(setting.dialect):
        return Turn(Outcome.BAD_CALL, (), turn.said)
    left = setting.dialogue.tool_calls - path.calls
    outcome = turn.outcome if len(turn.calls) <= left else Outcome.TOO_MANY_CALLS
    return Turn(outcome, numbered(setting.dialect, turn.calls[:left], path.calls), turn.said)


def _new_text(path: LiveTrajectory, sample: Sample, lane: Lane) -> tuple[str, Sample]:
    """Return the text that a sample adds to its turn, and the sample, cut at the turn's end.

    An engine looks for stop strings in what it samples. One that began in the head shows here.
    """
    tokenizer = lane.setting.tokenizer
    if not len(path.head):
        return tokenizer.decode(sample.tokens), sample
    tokens = np.concatenate([path.head, sample.tokens])
    pieces = segment.token_texts(tokenizer, int(tokens.max()) + 1)
    mark = "|".join(map(re.escape, lane.setting.dialect.stop_strings))
    stops = segment.completed(re.compile(mark), [pieces[token] for token in tokens])
    if len(stops):
        tokens = tokens[: stops[0] + 1]
        end = len(tokens) - len(path.head)
        sample = Sample(
            tokens[-end:],
            sample.logprobs[:end],
            sample.entropies[:end],
            StopReason.STOP,
            sample.experts,
        )
    whole = tokenizer.decode(tokens)
    return whole[common_prefix(path.head_text, whole) :], sample


def _append(path: LiveTrajectory, node: Node) -> None:
    """Append a node to the path; a prompt starts a new context."""
    nodes = path.tree.nodes
    nodes.append(node)
    path.node = len(nodes) - 1
    fresh = node.kind == PROMPT
    path.tokens = node.tokens if fresh else np.concatenate([path.tokens, node.tokens])
    path.response += 0 if fresh else len(node.tokens)


# ---------------------------------------------------------------- acts


def act(calling: Sequence[tuple[LiveTrajectory, Sequence[Call]]], lane: Lane) -> None:
    """Run the calls of a round, and append what answers them.

    The first calls of all paths run side by side, then the second ones, and so on. The calls of a
    turn that follow the end of its episode are not run.
    """
    seen: list[list[Observation]] = [[path.failed] if path.failed else [] for path, _ in calling]
    for number in range(max((len(calls) for _, calls in calling), default=0)):
        moving = [
            (path, calls[number], answers)
            for (path, calls), answers in zip(calling, seen, strict=True)
            if len(answers) == number < len(calls) and not (path.has_state and _over(answers))
        ]
        round_answers = lane.episodes.act([(path.episode, call) for path, call, _ in moving])
        for (_, _, answers), answer in zip(moving, round_answers, strict=True):
            answers.append(answer)
    for (path, calls), answers in zip(calling, seen, strict=True):
        observe(path, calls[: len(answers)], answers, lane)


def _over(answers: Sequence[Observation]) -> bool:
    return bool(answers) and answers[-1].ends


def observe(
    path: LiveTrajectory, calls: Sequence[Call], observations: Sequence[Observation], lane: Lane
) -> None:
    """Append what answers the acts of a turn; end a path that has ended, or has no room for it."""
    turn = _whole_turn(path)
    path.calls += len(calls)
    exchange = Exchange(turn.tokens, turn.text, tuple(calls), tuple(observations))
    path.past = (*path.past, exchange)
    unread = not path.live and not path.has_state  # no node and no observation has its text
    _on_turn(path, results=_results(exchange, [seen.text for seen in observations], unread))
    if path.has_state:
        _on_turn(path, observation=exchange.observation)
        if exchange.observation.ends:
            _on_turn(path, outcome=exchange.observation.ending)
            path.live = False
    if not path.live:  # its episode has ended, or it has made too many calls
        return
    forms = {"growing": _go_on, "fresh": _begin_anew}
    if not forms[lane.setting.dialogue.prompt](path, turn, exchange, lane):
        path.live = False
        _on_turn(path, outcome=Outcome.OUT_OF_SPACE)
        return
    path.judged = path.node


def _results(
    exchange: Exchange, texts: Sequence[str], unread: bool = False
) -> tuple[CallResult, ...]:
    """Return the results of a turn, given what is read of each.

    The only one has no text here, unless it is ``unread``: the trajectory has ended before it.
    """
    answered = zip(exchange.calls, exchange.observations, texts, strict=True)
    results = tuple(
        CallResult(call.id, call.tool, seen.outcome, call.argument, talk.readable(text))
        for call, seen, text in answered
    )
    whole = len(results) > 1 or unread
    return results if whole else (replace(results[0], argument="", text=""),)


def _whole_turn(path: LiveTrajectory) -> Node:
    """Return the turn that the path has just taken, with the part that it shares."""
    tree = path.tree
    return join([tree.nodes[part] for part in tree.parts(path.node)])


def _on_turn(path: LiveTrajectory, **changes: object) -> None:
    """Change the turn that the path has just taken."""
    nodes = path.tree.nodes
    nodes[path.node] = replace(nodes[path.node], **changes)  # type: ignore[arg-type]


def _go_on(path: LiveTrajectory, turn: Node, exchange: Exchange, lane: Lane) -> bool:
    """Append what answers a turn to the dialogue; return False where there is no room for it.

    Each result has ``result_tokens``. Where there is no room for all, they have equal shares of it.
    """
    setting, room, count = lane.setting, lane.room(path) - 1, len(exchange.calls)
    before = path.tokens[: len(path.tokens) - len(turn.tokens)]
    whole = min(setting.dialogue.result_tokens, room)
    for limit in dict.fromkeys((whole, min(whole, room // count))):
        written = observed(setting.dialect, before, turn.tokens, exchange, limit)
        if written is None:
            return _restart(path, turn, before, lane)
        text, tokens = written
        if len(tokens) <= min(room, limit * count):
            _note_texts(path, turn, before, limit, lane)
            outcome = exchange.observation.outcome
            _append(path, Node(path.node, RESULT, outcome, text, tokens, NOTHING, NOTHING))
            return True
    return False


def _note_texts(
    path: LiveTrajectory, turn: Node, before: NDArray[np.int32], limit: int, lane: Lane
) -> None:
    """Keep what the agent reads of each result of a turn that has several."""
    exchange = path.past[-1]
    texts = getattr(lane.setting.dialect, "texts", None)
    if texts and len(exchange.calls) > 1:
        read = texts(before, turn.tokens, exchange.calls, exchange.observations, limit)
        _on_turn(path, results=_results(exchange, read))


def _restart(path: LiveTrajectory, turn: Node, before: NDArray[np.int32], lane: Lane) -> bool:
    """Write the whole dialogue as a new prompt, where the dialect cannot go on."""
    tree, setting = path.tree, lane.setting
    first = tree.nodes[0].observation
    shown = shown_text((), first, setting.dialogue) if first else ""
    tokens = setting.dialect.restart(tree.question, shown, path.past)
    _note_texts(path, turn, before, setting.dialogue.result_tokens, lane)
    return _new_context(path, tokens, path.past[-1].observation.outcome, lane)


def _begin_anew(path: LiveTrajectory, turn: Node, exchange: Exchange, lane: Lane) -> bool:
    """Append the prompt of the next step; return False where it is too long."""
    setting, observation = lane.setting, exchange.observation
    shown = shown_text(path.past, observation, setting.dialogue)
    tokens = setting.dialect.prompt(path.tree.question, shown)
    assert setting.dialogue.prompt_tokens
    if len(tokens) > setting.dialogue.prompt_tokens:
        return False
    return _new_context(path, tokens, observation.outcome, lane)


def _new_context(path: LiveTrajectory, tokens: NDArray[np.int32], outcome: str, lane: Lane) -> bool:
    """Append a prompt below the turn, if there is room for it and a token."""
    left = lane.setting.dialogue.response_tokens - path.response
    if left < 1 or len(tokens) >= lane.context:
        return False
    text = lane.setting.tokenizer.decode(tokens)
    _append(path, Node(path.node, PROMPT, outcome, text, tokens, NOTHING, NOTHING))
    return True


# ---------------------------------------------------------------- the end of an episode


def end(ended_paths: Sequence[tuple[LiveTrajectory, Turn]], lane: Lane) -> None:
    """Tell the environment which agents have stopped acting; their last rewards are recorded.

    Where it fails at that, or has failed to start, this is the trajectory's outcome: the agent's
    last turn says nothing about it.
    """
    for path, _ in ended_paths:
        if path.failed is not None and path.tree.nodes[path.node].observation is None:
            _on_turn(path, observation=path.failed, outcome=path.failed.ending)
    running = [(path, turn) for path, turn in ended_paths if not _is_over(path)]
    said = [(path.episode, turn.said if turn.outcome in ENDED else "") for path, turn in running]
    for (path, _), last in zip(running, lane.episodes.end(said), strict=True):
        if last is not None:
            before = path.tree.nodes[path.node].observation
            _on_turn(path, observation=last if before is None else together(before, last))
            if last.outcome in ENDED_BY_WORLD:
                _on_turn(path, outcome=last.outcome)


def _is_over(path: LiveTrajectory) -> bool:
    """Return whether the path's episode has failed to start, or has ended by itself."""
    last = path.tree.nodes[path.node].observation
    return path.failed is not None or (last is not None and last.ends)


def together(step: Observation, last: Observation) -> Observation:
    """Add what an environment gives at the end to the step before it; a failure is of both."""
    whole = replace(step, reward=step.reward + last.reward, info={**step.info, **last.info})
    if last.outcome not in ENDED_BY_WORLD:
        return whole
    return replace(whole, outcome=last.outcome, text=f"{step.text}\n\n{last.text}", truncated=True)

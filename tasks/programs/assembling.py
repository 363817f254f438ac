"""Make a question's tree of its episodes: what was sampled, in the order of the trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.programs.episodes import ProgramEpisode, SampledAnswer
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import (
    PROGRAM,
    PROMPT,
    RESULT,
    TURN,
    CallResult,
    Node,
    Observation,
    Question,
    Tree,
    note_experts,
)

NOTHING: NDArray[np.float32] = np.zeros(0, np.float32)


def tree_of(
    question: Question, episodes: Sequence[ProgramEpisode], tokenizer: Any, policy_steps: int
) -> Tree:
    """Return the tree of a question whose leaves are its episodes; each has an answer at least.

    The root is the prompt of the first episode. Episodes that begin otherwise have prompts of their
    own below it.
    """
    first = episodes[0].in_order()[0].prompt
    tree = Tree(question, [Node(-1, PROMPT, "", question.text, first, NOTHING, NOTHING)])
    for episode in episodes:
        answers = episode.in_order()
        last, before = 0, None
        for answer in answers:
            last = _append(tree, last, before, answer, tokenizer, policy_steps)
            before = answer
        tree.nodes[last] = _ended(tree.nodes[last], episode)
        tree.leaves.append(last)
    return tree


def _append(
    tree: Tree,
    last: int,
    before: SampledAnswer | None,
    answer: SampledAnswer,
    tokenizer: Any,
    steps: int,
) -> int:
    """Append a turn, and what was read before it; return its node."""
    turn = tree.nodes[last]
    begins = before is None and np.array_equal(answer.prompt, turn.tokens)
    if before is not None and answer.before is before:
        results = _results(before, answer)
        tree.nodes[last] = replace(turn, results=results)
        tree.nodes.append(_read(last, RESULT, Outcome.OK, answer.observed, tokenizer))
        last = len(tree.nodes) - 1
    elif not begins:
        outcome = "" if before is None else Outcome.OK
        tree.nodes.append(_read(last, PROMPT, outcome, answer.prompt, tokenizer))
        last = len(tree.nodes) - 1
    sample = answer.sample
    measured = (sample.tokens, sample.logprobs, sample.entropies)
    text = tokenizer.decode(sample.tokens)
    node = Node(last, TURN, answer.reply.outcome, text, *measured, policy_steps=steps)
    tree.nodes.append(node)
    note_experts(tree, len(tree.nodes) - 1, sample.experts)
    return len(tree.nodes) - 1


def _read(parent: int, kind: str, outcome: str, tokens: NDArray[np.int32], tokenizer: Any) -> Node:
    return Node(parent, kind, outcome, tokenizer.decode(tokens), tokens, NOTHING, NOTHING)


def _results(before: SampledAnswer, answer: SampledAnswer) -> tuple[CallResult, ...]:
    """Return the results of a turn's calls, as the next request brings them.

    The only one has no text here: the node after the turn has it.
    """
    following = answer.asked.messages[len(before.forms) + 1 :]
    texts = {each.call_id: each.content for each in following if each.role == "tool"}
    calls = before.reply.message.calls
    if len(calls) == 1:
        (call,) = calls
        return (CallResult(call.id, call.name, Outcome.OK),) if texts else ()
    return tuple(
        CallResult(call.id, call.name, Outcome.OK, call.arguments, texts[call.id])
        for call in calls
        if call.id in texts
    )


def _ended(turn: Node, episode: ProgramEpisode) -> Node:
    """Return the last turn with what the program has returned, or how it has failed."""
    result = episode.result
    if result is None:
        told: dict[str, Any] = {"fault": episode.fault[:500]}
        outcome = episode.outcome or Outcome.PROGRAM_DIED
    else:
        told = {"answer": result.answer, "reward": result.reward, "parts": dict(result.parts)}
        said = result.answer is not None or result.reward is not None
        outcome = Outcome.ANSWER if said else Outcome.NO_ANSWER
    observation = Observation(Outcome.OK, "", info={PROGRAM: told})
    return replace(turn, outcome=outcome, observation=observation)

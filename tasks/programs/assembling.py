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
    split,
)

NOTHING: NDArray[np.float32] = np.zeros(0, np.float32)


Places = list[list[dict[int, int]]]  # episode, answer, tokens of it -> the node that ends there


def tree_of(
    question: Question, episodes: Sequence[ProgramEpisode], tokenizer: Any, policy_steps: int
) -> tuple[Tree, Places]:
    """Return the tree of a question whose leaves are its episodes; each has an answer at least.

    The root is the prompt of the first episode. Episodes that begin otherwise have prompts of their
    own below it; those that branch share nodes with the one that they branch from, and come after
    it. Returns, too, which node ends before each answer of each episode (0 tokens), and where
    others branch inside it.
    """
    first = episodes[0].in_order()[0].prompt
    tree = Tree(question, [Node(-1, PROMPT, "", question.text, first, NOTHING, NOTHING)])
    cuts = _cuts(episodes)
    turns: dict[tuple[int, int], dict[int, int]] = {}  # node before an answer, and the answer
    read: dict[tuple[int, bytes], int] = {}  # turn, and the tokens after it -> their node
    places: Places = []
    for episode in episodes:
        last, before = 0, None
        places.append([])
        for answer in episode.in_order():
            last = _before(tree, read, last, before, answer, tokenizer)
            key, begun = (last, id(answer)), answer.begun
            if key not in turns:
                parts = {0: last}
                # Where it was asked for after something else than before, all of it is its own.
                if begun is not None and (last, id(begun.answer)) in turns:
                    parts[begun.tokens] = turns[last, id(begun.answer)][begun.tokens]
                turns[key] = parts
                _append_turn(tree, parts, answer, cuts.get(id(answer), ()), tokenizer, policy_steps)
            parts = turns[key]
            places[-1].append(parts)
            last, before = parts[len(answer.tokens)], answer
        tree.nodes[last] = _ended(tree.nodes[last], episode)
        tree.leaves.append(last)
    return tree, places


def _cuts(episodes: Sequence[ProgramEpisode]) -> dict[int, list[int]]:
    """Return after how many tokens others branch inside an answer, by its identity; ascending."""
    begun = [answer.begun for each in episodes for answer in each.answers if answer.begun]
    return {
        id(one.answer): sorted({other.tokens for other in begun if other.answer is one.answer})
        for one in begun
    }


def _before(
    tree: Tree,
    read: dict[tuple[int, bytes], int],
    last: int,
    before: SampledAnswer | None,
    answer: SampledAnswer,
    tokenizer: Any,
) -> int:
    """Return the node that is read before an answer; a new one below ``last`` if need be."""
    if before is None and np.array_equal(answer.prompt, tree.nodes[last].tokens):
        return last
    goes_on = before is not None and answer.before is before
    key = last, answer.observed.tobytes() if goes_on else answer.prompt.tobytes() + b"prompt"
    if key not in read:
        if before is not None and goes_on:
            results = _results(before, answer)
            tree.nodes[last] = replace(tree.nodes[last], results=results)
        kind, tokens = (RESULT, answer.observed) if goes_on else (PROMPT, answer.prompt)
        outcome = "" if before is None else Outcome.OK
        text = tokenizer.decode(tokens)
        tree.nodes.append(Node(last, kind, outcome, text, tokens, NOTHING, NOTHING))
        read[key] = len(tree.nodes) - 1
    return read[key]


def _append_turn(
    tree: Tree,
    parts: dict[int, int],
    answer: SampledAnswer,
    cuts: Sequence[int],
    tokenizer: Any,
    policy_steps: int,
) -> None:
    """Append a turn, in parts that end after so many of its tokens; note their nodes in ``parts``.

    A part that ``parts`` has already is another answer's, from which this one goes on.
    """
    sample, text = answer.sample, tokenizer.decode(answer.sample.tokens)
    measured = (sample.tokens, sample.logprobs, sample.entropies)
    whole = Node(-1, TURN, answer.reply.outcome, text, *measured, policy_steps=policy_steps)
    begun = max(parts)
    cut, _ = split([whole], {0: sorted({begun, *cuts} - {0})}, tokenizer.decode)
    end = begun
    for part in cut[begun > 0 :]:
        tree.nodes.append(replace(part, parent=parts[end]))
        end += len(part.tokens)
        parts[end] = len(tree.nodes) - 1
    note_experts(tree, parts[end], sample.experts)


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
    if episode.differs:
        told: dict[str, Any] = {"fault": "it asked something else than before"}
        outcome = Outcome.REPLAY_DIFFERS
    elif result is None:
        told = {"fault": episode.fault[:500]}
        outcome = Outcome(episode.outcome or Outcome.PROGRAM_DIED)
    else:
        told = {"answer": result.answer, "reward": result.reward, "parts": dict(result.parts)}
        said = result.answer is not None or result.reward is not None
        outcome = Outcome.ANSWER if said else Outcome.NO_ANSWER
    observation = Observation(Outcome.OK, "", info={PROGRAM: told})
    return replace(turn, outcome=outcome, observation=observation)

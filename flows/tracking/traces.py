"""Turn trajectories into traces: what the agent read and wrote, turn by turn.

A trace is one trajectory of a tree: a span for the whole, and below it one for each turn of the
agent and one for each tool call. Trees hold no clock times, so times are token positions, one token
a millisecond: a span that starts at 57 ms starts after 57 tokens, prompt included. They are
written to MLflow by flows/tracking/trace_writing.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from numpy.typing import NDArray

from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.rewards.contract import was_scored
from tasks.trees import dialogue as talk
from tasks.trees.outcomes import Outcome
from tasks.trees.tables import load_trees, read_rows
from tasks.trees.tree import TURN, Call, CallResult, Node, Question, Tree, calls_of, join
from tasks.trees.words import UNSAFE

AGENT, CHAT_MODEL, TOOL = "AGENT", "CHAT_MODEL", "TOOL"  # kinds of spans, as MLflow names them
PAGE = "reports/{}/page.html"  # of a run (flows/pages/)
EVALUATION = "evaluation"  # stands for the number of an iteration in addresses of the page
TEXT_CHARACTERS = 20_000  # of one text in a span, at most
PREVIEW_CHARACTERS = 1_000  # of a question, an answer or a tag in a list of traces, at most
NAME_CHARACTERS = 250
TIMES = "token positions, one token a millisecond"
SOUND = {Outcome.OK, Outcome.CALL, Outcome.ANSWER}  # outcomes of a part that ended well

ReadCalls = Callable[[str], Sequence[Call]]  # the text of a turn -> the calls that it ends with

_UNPRINTABLE = re.compile(f"(?!\r)[{''.join(UNSAFE.values())}]")


@dataclass(frozen=True)
class Span:
    """A part of a trajectory, from token ``start`` up to token ``end``."""

    name: str
    kind: str  # AGENT, CHAT_MODEL or TOOL
    start: int
    end: int
    inputs: Any  # as JSON can hold it
    outputs: Any
    outcome: str
    attributes: Mapping[str, Any]

    @property
    def sound(self) -> bool:
        """Whether the part ended well: with an answer, a well-formed call or a tool's result."""
        return self.outcome in SOUND


@dataclass(frozen=True)
class MlflowTrace:
    """One trajectory; the first of its ``spans`` is the whole, the others are its parts in order.

    ``key`` names the trajectory and everything that it shows: 32 hexadecimal digits, equal for
    equal work. ``began`` is in unix milliseconds.
    """

    key: str
    name: str
    began: int
    question: str  # as a list shows it
    answer: str
    spans: tuple[Span, ...]
    tags: Mapping[str, str]
    feedback: Mapping[str, float | bool | str]
    reason: str  # for the feedback
    accepted: tuple[str, ...]  # forms of the gold answer


def sample(
    step: SubStep,
    trees: Artifact,
    rewards: Artifact,
    at: float,
    size: int,
    read: ReadCalls = talk.read_calls,
) -> list[MlflowTrace]:
    """Return the traces of the first ``size`` questions of an iteration, one for each leaf.

    ``at`` is when the rollout had finished, in unix seconds. Each trace begins one millisecond
    before the one that precedes it here, so that a page with the newest first keeps this order.
    ``read`` finds the calls in the text of a turn, as the recipe's dialect does.
    """
    scores = {(row["question"], row["leaf"]): row for row in read_rows(Path(rewards.path))}
    pairs = [
        (tree, leaf)
        for tree in load_trees(Path(trees.path))[:size]
        for leaf in range(len(tree.leaves))
    ]
    return [
        trace(
            tree,
            leaf,
            scores[tree.question.id, leaf],
            step,
            key=key_of(step, trees.digest, rewards.digest, tree.question.id, leaf),
            began=round(at * 1000) - index,
            read=read,
        )
        for index, (tree, leaf) in enumerate(pairs)
    ]


def trace(
    tree: Tree,
    leaf: int,
    score: Mapping[str, Any],
    step: SubStep,
    *,
    key: str,
    began: int,
    read: ReadCalls = talk.read_calls,
) -> MlflowTrace:
    """Return the trace of a leaf, given its row of the table of rewards (tasks/reward.py)."""
    question = tree.question
    success = bool(score["success"]) if was_scored(score["breakdown"]) else None
    tags = {
        "recipe": step.recipe,
        "stage": step.stage,
        "iteration": str(step.iteration),
        "question": question.id,
        "kind": question.kind,
        "leaf": str(leaf),
        "outcome": score["outcome"],
        "reward": f"{score['reward']:g}",
        "success": "not scored" if success is None else str(success).lower(),
        "faults": ", ".join(score["faults"]) or "none",
        "page": place_in_page(step.recipe, step.iteration, question.id, leaf),
    }
    return MlflowTrace(
        key=key,
        name=printable(f"{question.id} leaf {leaf}, iteration {step.iteration}", NAME_CHARACTERS),
        began=began,
        question=printable(question.text, PREVIEW_CHARACTERS),
        answer=printable(score["answer"] or f"no answer ({score['outcome']})", PREVIEW_CHARACTERS),
        spans=tuple(spans(tree, leaf, score, read)),
        tags={name: printable(value, PREVIEW_CHARACTERS) for name, value in tags.items()},
        feedback={
            "reward": float(score["reward"]),
            **({} if success is None else {"success": success}),
            "outcome": score["outcome"],
        },
        reason=_reason(score),
        accepted=tuple(printable(form, PREVIEW_CHARACTERS) for form in question.answers),
    )


def spans(
    tree: Tree, leaf: int, score: Mapping[str, Any], read: ReadCalls = talk.read_calls
) -> Iterator[Span]:
    """Yield the span of the whole trajectory ``leaf``, then those of its turns and tool calls.

    Each call of a turn that was carried out has a span of its own, also where the trajectory ends
    with the turn.

    A turn's input is what the agent has read since its last turn: the messages of the question (the
    recipe's system message, which all of them share, is left out), or the tool's result.
    """
    path = tree.path(tree.leaves[leaf])
    steps = tree.steps(tree.leaves[leaf])
    nodes = [join([tree.nodes[part] for part in step]) for step in steps]
    ends = list(accumulate(len(node.tokens) for node in nodes))
    leaves = _leaves_of(tree)
    yield _whole(tree.question, leaf, path, nodes, score)
    turns = 0
    for index in range(1, len(steps)):
        node, before = nodes[index], nodes[index - 1]
        where = (ends[index - 1], ends[index])
        branch = _branch(tree, steps[index], node, leaves)
        if node.kind == TURN:
            turns += 1
            seen = [{"role": "tool", "content": printable(before.text)}]
            messages = _messages(tree.question) if index == 1 else seen
            yield _turn(node, messages, turns, where, branch | {"tokens_read": len(before.tokens)})
        else:
            for each in calls_of(before.results, read(before.text), node.outcome, node.text):
                yield _tool_call(each, before, where, branch)
    last = nodes[-1]
    if last.kind == TURN and last.results:  # no node follows calls that an agent does not read of
        text = last.observation.text if last.observation else ""
        unread = _branch(tree, steps[-1], last, leaves) | {"tokens": 0}
        for each in calls_of(last.results, read(last.text), last.outcome, text):
            yield _tool_call(each, last, (ends[-1], ends[-1]), unread)


def _whole(
    question: Question,
    leaf: int,
    path: Sequence[int],
    nodes: Sequence[Node],
    score: Mapping[str, Any],
) -> Span:
    """Return the span of a whole trajectory: question in, answer out."""
    answer = None if score["answer"] is None else printable(score["answer"])
    attributes = {
        "leaf": leaf,
        "path": list(path),
        "response_tokens": score["response_tokens"],
        "sampled_tokens": score["sampled_tokens"],
        **_uncertainty(nodes),
        "times": TIMES,
    }
    end = sum(len(node.tokens) for node in nodes)
    inputs, outputs = {"messages": _messages(question)}, {"answer": answer}
    return Span("agent", AGENT, 0, end, inputs, outputs, score["outcome"], attributes)


def _turn(
    node: Node, read: Sequence[Any], number: int, where: tuple[int, int], attributes: Any
) -> Span:
    wrote = {"role": "assistant", "content": printable(node.text)}
    inputs = {"messages": list(read)}
    outputs = {"choices": [{"message": wrote}]}
    return Span(f"turn {number}", CHAT_MODEL, *where, inputs, outputs, node.outcome, attributes)


def _tool_call(
    call: CallResult, turn: Node, where: tuple[int, int], attributes: dict[str, Any]
) -> Span:
    """Return the span of a tool call; those of one turn have the place of all their results."""
    inputs = {"call": printable(call.argument or turn.text)}
    outputs = {"result": printable(call.text)}
    named = attributes | ({"call_id": printable(call.id)} if call.id else {})
    return Span(call.tool or "tool", TOOL, *where, inputs, outputs, call.outcome, named)


def printable(text: str, limit: int = TEXT_CHARACTERS) -> str:
    """Return ``text``, cut with a note, with a box for each character that no store accepts.

    Those are control characters (a null byte ends a text in some databases), halves of surrogate
    pairs (which UTF-8 cannot write), and what is invisible or changes the order of writing. The
    note counts within ``limit``.
    """
    if len(text) > limit:
        note = f" [cut: {len(text):,} characters in all]"
        text = text[: max(0, limit - len(note))] + note
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def _messages(question: Question) -> list[dict[str, str]]:
    before = [{"role": m.role, "content": printable(m.content)} for m in question.before]
    return [*before, {"role": "user", "content": printable(question.text)}]


def _branch(
    tree: Tree, parts: Sequence[int], node: Node, leaves: Mapping[int, Sequence[int]]
) -> dict[str, Any]:
    """Return where a node stands in its tree, and which trajectories contain all of it.

    Of a turn inside which trajectories part, the last of ``parts`` is shown, and how many of the
    turn's first tokens others share.
    """
    through = leaves[parts[-1]]
    shared = [len(tree.nodes[part].tokens) for part in parts if len(leaves[part]) > 1]
    return {
        "node": parts[-1],
        "parent": node.parent,
        "leaves": list(through),
        "shared": len(through) > 1,
        "shared_tokens": sum(shared),
        "tokens": len(node.tokens),
        **_uncertainty([node]),
    }


def _leaves_of(tree: Tree) -> dict[int, list[int]]:
    """Return node -> the leaves whose trajectories contain it."""
    leaves_by_node: dict[int, list[int]] = {}
    for leaf, last in enumerate(tree.leaves):
        for index in tree.path(last):
            leaves_by_node.setdefault(index, []).append(leaf)
    return leaves_by_node


def _uncertainty(nodes: Sequence[Node]) -> dict[str, float]:
    """Return mean entropy (of 1) and log-probability (nats) of sampled tokens, if there are any."""
    turns = [node for node in nodes if node.kind == TURN]
    means = {
        "mean_entropy": _mean([node.entropies for node in turns]),
        "mean_logprob": _mean([node.logprobs for node in turns]),
    }
    return {name: value for name, value in means.items() if value is not None}


def _mean(parts: Sequence[NDArray[Any]]) -> float | None:
    values = [float(value) for part in parts for value in part]
    mean = sum(values) / len(values) if values else math.nan
    return round(mean, 4) if math.isfinite(mean) else None


def _reason(score: Mapping[str, Any]) -> str:
    faults = ", ".join(score["faults"])
    if faults:
        return f"format faults: {faults}"
    if score["answer"] is None:
        return f"no answer could be extracted ({score['outcome']})"
    if not was_scored(score["breakdown"]):
        return "the answer was not scored"
    if score["success"]:
        return "the answer is right"
    if not score["score"]:
        return "the answer is wrong"
    parts = ", ".join(f"{name} {value:.3g}" for name, value in dict(score["breakdown"]).items())
    return f"the answer is partly right: {parts}"


def key_of(step: SubStep, trees: str, rewards: str, question: str, leaf: int) -> str:
    """Return the key of a trajectory's trace; ``trees`` and ``rewards`` are digests."""
    text = json.dumps([step.recipe, step.stage, step.iteration, trees, rewards, question, leaf])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def trace_id(step: SubStep, trees: str, rewards: str, question: str, leaf: int) -> str:
    """Return the id that the store knows a trajectory's trace by."""
    return f"tr-{key_of(step, trees, rewards, question, leaf)}"


def place_in_page(recipe: str, iteration: int | str, question: str, leaf: int) -> str:
    """Return the address of a trajectory in the page of its run, as seen from the checkout.

    ``iteration``: its number, or EVALUATION.
    """
    fragment = urlencode({"iteration": iteration, "question": question, "leaf": leaf})
    return f"{PAGE.format(recipe)}#{fragment}"

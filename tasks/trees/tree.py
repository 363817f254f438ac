"""The nouns of the pipeline: question, observation of a tool, node, tree; and their tables.

A tree holds all rollouts of one question. Its root is the prompt; every other node is one turn of
the agent (sampled tokens) or one tool result (observed tokens). Branches share the nodes before
them, so a token that several trajectories share is stored once. A turn inside which trajectories
part is stored as several nodes, one after the other: its parts. A leaf is the last node of a
trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from tasks.trees.outcomes import Outcome

PROMPT, TURN, RESULT = "prompt", "turn", "result"  # kinds of nodes
AFTER_RESULT, AT_MARK = "entropy", "mark"  # kinds of branching decisions


@dataclass(frozen=True)
class Message:
    """One message of a chat: who speaks ("system", "user", "assistant"), and what."""

    role: str
    content: str


@dataclass(frozen=True)
class Question:
    """One task for the agent.

    ``answers`` are the accepted forms of the gold answer, ``scorer`` the kind that compares an
    answer with them (tasks/scorers/). ``text`` is the user's message; a chat-formatted prompt has
    more messages ``before`` it.
    """

    id: str
    kind: str
    text: str
    answers: tuple[str, ...]
    scorer: str = "exact"
    before: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Document:
    """One entry of a corpus that the agent can search."""

    title: str
    text: str


@dataclass(frozen=True)
class Call:
    """A tool call: the tool's name and what the agent handed it."""

    tool: str
    argument: str


@dataclass(frozen=True)
class Observation:
    """What one tool call gave back."""

    outcome: str  # an Outcome of a tool call
    text: str


@dataclass(frozen=True)
class Node:
    """A run of tokens in a tree.

    tokens [T] int32; logprobs [T] and entropies [T] float32, of sampled nodes only (empty
    elsewhere): log-probabilities at the sampling temperature in nats, entropies divided by
    ln|V|, in [0, 1].
    """

    parent: int  # index in the tree; -1 for the prompt
    kind: str  # PROMPT, TURN or RESULT
    outcome: str  # an Outcome; "" for the prompt
    text: str
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    entropies: NDArray[np.float32]


@dataclass(frozen=True)
class Decision:
    """One branching decision (algorithms sections 1 and 2), kept for audit and plots.

    Entropies are means over the first tokens (``rollout.entropy_window``) that a trajectory
    samples: in its first turn, and after the branching point. They are normalised, in [0, 1].
    """

    kind: str  # AFTER_RESULT or AT_MARK
    node: int  # the branches start after it; where none was started, it may go on past the point
    path: int  # the trajectory that was judged
    position: int  # tokens of that trajectory before the branching point, prompt included
    initial_entropy: float
    entropy: float
    rise: float  # entropy - initial_entropy
    probability: float | None  # None at a mark, which needs none
    wanted: bool  # what the rule says
    added: int  # branches that were started: what the budget allowed


@dataclass
class Tree:
    """All rollouts of one question; ``leaves[i]`` is the last node of trajectory i."""

    question: Question
    nodes: list[Node] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def path(self, leaf: int) -> list[int]:
        """Node indices from the root to ``leaf``, both included."""
        nodes = [leaf]
        while self.nodes[nodes[-1]].parent >= 0:
            nodes.append(self.nodes[nodes[-1]].parent)
        return nodes[::-1]

    def parts(self, node: int) -> list[int]:
        """The parts of a turn up to its part ``node``; of any other node itself alone."""
        parts = [node]
        while self.nodes[parts[0]].kind == self.nodes[self.nodes[parts[0]].parent].kind == TURN:
            parts.insert(0, self.nodes[parts[0]].parent)
        return parts

    def steps(self, leaf: int) -> list[list[int]]:
        """As ``path``, with the parts of a turn together: prompt, turn, result, turn, ..."""
        steps = [self.parts(leaf)]
        while (before := self.nodes[steps[-1][0]].parent) >= 0:
            steps.append(self.parts(before))
        return steps[::-1]

    def trajectories(self) -> Iterator[list[Node]]:
        """The nodes of each leaf's trajectory, prompt first, in leaf order; turns are whole."""
        for leaf in self.leaves:
            yield [join([self.nodes[part] for part in step]) for step in self.steps(leaf)]


def join(parts: Sequence[Node]) -> Node:
    """One node of the parts of a turn, which ends as the last of them does."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        outcome=parts[-1].outcome,
        text="".join(part.text for part in parts),
        tokens=np.concatenate([part.tokens for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        entropies=np.concatenate([part.entropies for part in parts]),
    )


def common_prefix(first: str, second: str) -> int:
    """How many characters two texts begin alike with."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def split(
    nodes: Sequence[Node],
    cuts: Mapping[int, Sequence[int]],
    decode: Callable[[NDArray[np.int32]], str],
) -> tuple[list[Node], list[int]]:
    """Take whole turns apart: the nodes with parts in their places, parents before children.

    ``cuts`` has, by node, the numbers of tokens before each cut, ascending, all inside the node;
    ``decode`` gives the text of tokens. Second comes, for each old node, the index of its last part
    (of itself where it is not cut); its other parts stand right before.
    """
    new: list[Node] = []
    last: list[int] = []
    for index, node in enumerate(nodes):
        parent = last[node.parent] if node.parent >= 0 else -1
        for part in _parts(node, cuts.get(index, ()), decode):
            new.append(replace(part, parent=parent))
            parent = len(new) - 1
        last.append(parent)
    return new, last


def _parts(
    turn: Node, cuts: Sequence[int], decode: Callable[[NDArray[np.int32]], str]
) -> Iterator[Node]:
    """A turn in parts whose texts add up to its own.

    A character whose bytes lie on both sides of a cut belongs to the later part.
    """
    written = 0  # characters of the parts so far
    for start, end in zip([0, *cuts], [*cuts, len(turn.tokens)], strict=True):
        whole = end == len(turn.tokens)
        so_far = decode(turn.tokens[:end]).rstrip("\N{REPLACEMENT CHARACTER}")
        shared = common_prefix(so_far, turn.text)
        reach = len(turn.text) if whole else max(written, shared)
        yield replace(
            turn,
            outcome=turn.outcome if whole else Outcome.PART,
            text=turn.text[written:reach],
            tokens=turn.tokens[start:end],
            logprobs=turn.logprobs[start:end],
            entropies=turn.entropies[start:end],
        )
        written = reach


def response(trajectory: Sequence[Node]) -> str:
    """What follows the prompt, as text: turns and tool results."""
    return "".join(node.text for node in trajectory[1:])


def sampled(trajectory: Sequence[Node]) -> list[Node]:
    """The agent's own nodes of a trajectory."""
    return [node for node in trajectory if node.kind == TURN]

"""The data types of the pipeline: question, tool call, observation, node, tree.

A tree holds all rollouts of one question. Its root is the prompt; every other node is one turn of
the agent (sampled tokens), one tool result (observed tokens), or a fresh prompt. Branches share the
nodes before them, so a token that several trajectories share is stored once. Where trajectories
branch inside a turn, that turn is stored as several nodes, one after the other: its parts. A leaf
is the last node of a trajectory. Fresh prompts cut a trajectory into contexts.

Dimension letters, in shapes and in the names of arrays, everywhere in the project:

    L   leaves of a tree, or of a micro-batch
    S   sampled tokens of a leaf; where leaves are padded to one size, of the longest
    T   tokens of a path from the root to a leaf, prompt and tool results included
    U   unique tokens of a tree or a micro-batch, each in its own slot
    P   unique sampled tokens of a tree or a micro-batch
    E   environment steps of a leaf: its turns
    N   entries of several arrays laid end to end
    H   hidden size of a model
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.trees.outcomes import ACTED, ENDED_BY_WORLD, Outcome

PROMPT, TURN, RESULT = "prompt", "turn", "result"  # kinds of nodes
# The key of ``Observation.info`` under which a world may say, in one word, why it refused an act.
REFUSAL = "refusal"
# The key under which the last turn of a program's episode has what the program has returned.
PROGRAM = "program"
AFTER_RESULT, AT_MARK = "entropy", "mark"  # kinds of branching decisions


@dataclass(frozen=True)
class Message:
    """One message of a chat."""

    role: str  # "system", "user" or "assistant"
    content: str


@dataclass(frozen=True)
class Question:
    """One task for the agent.

    ``answers`` are the accepted forms of the gold answer, ``scorer`` names the function that
    compares an answer with them (tasks/scorers/). ``text`` is the user's message; a prompt that is
    a chat has more messages ``before`` it. ``data`` is what an environment starts the task from, as
    a JSON object; its entry "seed", where it has one, is the seed of the episode.
    """

    id: str
    kind: str
    text: str
    answers: tuple[str, ...]
    scorer: str = "exact"
    before: tuple[Message, ...] = ()
    data: str = ""


@dataclass(frozen=True)
class Document:
    """One entry of a corpus that the agent can search."""

    title: str
    text: str


@dataclass(frozen=True)
class ToolSpec:
    """What an agent is told about a tool: its name, what it does, and its parameters."""

    name: str  # letters, digits, "_" and "-"
    description: str
    parameters: Mapping[str, Any]  # a JSON schema of type "object"

    @property
    def text_parameter(self) -> str | None:
        """Return the name of the only parameter if it is a required string, else None."""
        properties = self.parameters.get("properties", {})
        (name,) = properties if len(properties) == 1 else (None,)
        schema = properties[name] if name else None  # true and false are schemas, too
        single = isinstance(schema, Mapping) and schema.get("type") == "string"
        return name if single and name in self.parameters.get("required", ()) else None


@dataclass(frozen=True)
class Call:
    """One act of the agent: the name of a tool, and its argument as the agent wrote it.

    ``argument`` is the text of the tool's only parameter where that is a string, else a JSON object
    of all parameters. ``values`` are the parameters by name, once they fit the tool's schema
    (tasks/tools/schema.py). ``id`` names the call in its dialogue, as the agent has written it or
    as the dialect numbers it; "" before it is allowed to run.
    """

    tool: str
    argument: str
    values: Mapping[str, Any] = field(default_factory=dict, compare=False)
    id: str = field(default="", compare=False)


@dataclass(frozen=True)
class Observation:
    """What answers one act: the result of a tool, or a step of an environment.

    Only environments with a state use more than ``outcome`` and ``text``.
    """

    outcome: str  # an Outcome of a tool call
    text: str
    reward: float = 0.0  # of this step
    terminated: bool = False  # the environment has ended the episode
    truncated: bool = False  # the episode ends here, and its task is not ended: a limit, a failure
    state: str | None = None  # key of the state that is seen; None: the text with the actions
    actions: tuple[str, ...] = ()  # admissible acts, where the environment lists them
    # small values of JSON; equal observations have equal ones
    info: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def key(self) -> str:
        """Return the key of the state that the agent acts on next."""
        return "\n".join([self.text, *self.actions]) if self.state is None else self.state

    @property
    def ends(self) -> bool:
        """Return whether no act can follow."""
        return self.terminated or self.truncated

    @property
    def ending(self) -> str:
        """Return the outcome of a turn with whose act an episode has ended."""
        if self.terminated:
            return Outcome.TERMINATED
        return self.outcome if self.outcome in ENDED_BY_WORLD else Outcome.TRUNCATED


def joined(seen: Sequence[Observation]) -> Observation:
    """Return what answers the acts of one turn as one observation: that of its environment step.

    Rewards add up, texts are joined by blank lines, and the state, the admissible acts, the end and
    ``info`` are the last one's. The outcome is the first that is not OK, unless the last act ends
    the episode, whose outcome it then is.
    """
    if len(seen) == 1:
        return seen[0]
    last = seen[-1]
    failed = [each.outcome for each in seen if each.outcome != Outcome.OK]
    return replace(
        last,
        outcome=failed[0] if failed and not last.ends else last.outcome,
        text="\n\n".join(each.text for each in seen),
        reward=math.fsum(each.reward for each in seen),
        state=last.key,
    )


@dataclass(frozen=True)
class CallResult:
    """A result: what came of a call that was executed.

    Of the only call of a turn, argument and text are "": the turn has the one, and the node after
    it the other. Where a trajectory ends with its turn, which made more calls than were left, both
    are here.
    """

    id: str  # of the call in its dialogue
    tool: str
    outcome: str  # an Outcome of a tool call
    argument: str = ""
    text: str = ""  # of the result, as the agent reads it


@dataclass(frozen=True)
class Node:
    """A run of tokens in a tree.

    ``tokens`` has one entry a token of the node. ``logprobs`` (nats, at the sampling temperature)
    and ``entropies`` (divided by ln|V|, in [0, 1]) have the same length in turns and are empty
    elsewhere. ``observation`` is what an environment with a state answered to the act that a turn
    ends with; in the root, the first one. It is None for questions with tools, whose results are
    nodes. The last observation of an episode has no node of its own.

    A turn may make several calls. ``results`` are those of the calls that were executed, in their
    order; in trees of earlier releases, whose turns made one call at most, they are empty. The node
    below the turn holds all of them: what follows it has read the last one.

    A node of kind PROMPT below a turn starts a new context: it holds a whole prompt, and what
    follows it attends to nothing before it.

    ``policy_steps`` are the optimizer steps that the policy of a turn had taken when it sampled: 0
    outside of training, and in nodes that no policy has sampled.

    ``experts`` [tokens, routers, chosen]: which experts of a mixture the sampler sent each token
    to, of the first tokens on; the last token of a leaf has none, because nothing follows from it.
    None where the policy has no mixtures, or its engine does not say.
    """

    parent: int  # index in the tree; -1 for the prompt
    kind: str  # PROMPT, TURN or RESULT
    # An Outcome; "" for the first prompt. A result, or a fresh prompt, has that of the act before
    # it, of several the first that is not OK.
    outcome: str
    text: str
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    entropies: NDArray[np.float32]
    observation: Observation | None = None
    policy_steps: int = 0
    results: tuple[CallResult, ...] = ()
    experts: NDArray[Any] | None = None


@dataclass(frozen=True)
class Decision:
    """One branching decision (tasks/rollouts/branching.py), stored for audit and plots.

    Both entropies are means over the first ``rollout.entropy_window`` tokens that a trajectory
    samples: in its first turn, and after the branching point. They are divided by ln|V|, so they
    are in [0, 1].
    """

    kind: str  # AFTER_RESULT or AT_MARK
    node: int  # branches start after it; if none was started, it may extend past the point
    path: int  # index of the trajectory
    position: int  # tokens of that trajectory before the branching point, prompt included
    initial_entropy: float
    entropy: float
    rise: float  # entropy - initial_entropy
    probability: float | None  # None at a mark, where every trajectory branches
    wanted: bool  # the decision of the rule
    added: int  # branches that were started, as the budget allowed


@dataclass
class Tree:
    """All rollouts of one question. ``leaves`` [L]: the index of each trajectory's last node."""

    question: Question
    nodes: list[Node] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    @property
    def of_world(self) -> bool:
        """Return whether an environment with a state answered the agent."""
        return bool(self.nodes) and self.nodes[0].observation is not None

    def path(self, leaf: int) -> list[int]:
        """Return the node indices from the root to ``leaf``, both included."""
        nodes = [leaf]
        while self.nodes[nodes[-1]].parent >= 0:
            nodes.append(self.nodes[nodes[-1]].parent)
        return nodes[::-1]

    def parts(self, node: int) -> list[int]:
        """Return the parts of a turn up to its part ``node``; for any other node, just itself."""
        parts = [node]
        while self.nodes[parts[0]].kind == self.nodes[self.nodes[parts[0]].parent].kind == TURN:
            parts.insert(0, self.nodes[parts[0]].parent)
        return parts

    def steps(self, leaf: int) -> list[list[int]]:
        """Return ``path`` with the parts of each turn in one list: prompt, turn, result, ..."""
        steps = [self.parts(leaf)]
        while (before := self.nodes[steps[-1][0]].parent) >= 0:
            steps.append(self.parts(before))
        return steps[::-1]

    def contexts(self, leaf: int) -> list[list[int]]:
        """Return ``path`` cut before each prompt: what a token can attend to is in its own list."""
        contexts: list[list[int]] = []
        for node in self.path(leaf):
            if self.nodes[node].kind == PROMPT:
                contexts.append([])
            contexts[-1].append(node)
        return contexts

    def trajectories(self) -> Iterator[list[Node]]:
        """Yield each leaf's nodes, prompt first, in leaf order, with turns joined from parts."""
        for leaf in self.leaves:
            yield [join([self.nodes[part] for part in step]) for step in self.steps(leaf)]

    def with_leaves(self, leaves: Sequence[int]) -> Tree:
        """Return the tree with some of its leaves, by their numbers; nodes keep their indices."""
        return replace(self, leaves=[self.leaves[leaf] for leaf in leaves])

    def acts(self) -> list[str]:
        """Return the outcome of each executed act; one that trajectories share is there once."""
        after: dict[int, Node] = {node.parent: node for node in self.nodes if node.kind != TURN}
        turns = ((i, node) for i, node in enumerate(self.nodes) if node.kind == TURN)
        return [outcome for i, turn in turns for outcome in acts_of(turn, after.get(i))]


def join(parts: Sequence[Node]) -> Node:
    """Join the parts of a turn to one node: what answers it is the last part's."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        outcome=parts[-1].outcome,
        text="".join(part.text for part in parts),
        tokens=np.concatenate([part.tokens for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        entropies=np.concatenate([part.entropies for part in parts]),
        observation=parts[-1].observation,
        results=parts[-1].results,
        experts=_joined([part.experts for part in parts]),
    )


def _joined(experts: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    """Join the experts of parts of a turn, of which the last alone may lack some."""
    known = [one for one in experts if one is not None]
    return np.concatenate(known) if len(known) == len(experts) else None


def note_experts(tree: Tree, node: int, experts: NDArray[Any] | None) -> None:
    """Give the nodes of the context that ends with ``node`` the experts of their tokens.

    ``experts`` [tokens, routers, chosen] are of the context's first tokens. What a node has of an
    earlier turn stays: it is what its own tokens were sampled with, maybe by another policy.
    """
    if experts is None:
        return
    start = 0
    for index in tree.contexts(node)[-1]:
        one = tree.nodes[index]
        end = start + len(one.tokens)
        known = one.experts if one.experts is not None else experts[:0]
        if len(known) < len(one.tokens):
            more = experts[start + len(known) : end]
            tree.nodes[index] = replace(one, experts=np.concatenate([known, more]))
        start = end


def common_prefix(first: str, second: str) -> int:
    """Return how many characters two texts share from the start."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def common_length(one: NDArray[Any], other: NDArray[Any]) -> int:
    """Return the length of the longest common prefix of two arrays."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def split(
    nodes: Sequence[Node],
    cuts: Mapping[int, Sequence[int]],
    decode: Callable[[NDArray[np.int32]], str],
) -> tuple[list[Node], list[int]]:
    """Split whole turns into parts; parents stay before children.

    ``cuts``: node -> numbers of tokens before each cut, ascending, all inside the node; ``decode``
    turns tokens into text. Returns the new nodes and, for each old node, the index of its last part
    (of the node itself where it was not cut). Its other parts are right before that index.
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
    """Yield the parts of a turn; their texts joined are the turn's text.

    A character whose bytes are on both sides of a cut belongs to the later part.
    """
    written = 0  # characters in the parts so far
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
            experts=None if turn.experts is None else turn.experts[start:end],
            observation=turn.observation if whole else None,
            results=turn.results if whole else (),
        )
        written = reach


def response(trajectory: Sequence[Node]) -> str:
    """Return the text of turns and tool results, without prompts."""
    return "".join(node.text for node in trajectory if node.kind != PROMPT)


def response_tokens(trajectory: Sequence[Node]) -> int:
    """Count the tokens of turns and tool results. **Chosen**: a fresh prompt's do not count."""
    return sum(len(node.tokens) for node in trajectory if node.kind != PROMPT)


def sampled(trajectory: Sequence[Node]) -> list[Node]:
    """Return the turns of a trajectory, which the agent sampled."""
    return [node for node in trajectory if node.kind == TURN]


def acts(trajectory: Sequence[Node]) -> list[str]:
    """Return the outcomes of the acts (tool calls, steps of a world) that were executed."""
    pairs = pairwise([*trajectory, None])
    return [o for turn, after in pairs if turn and turn.kind == TURN for o in acts_of(turn, after)]


def masked_leaves(tree: Tree, outcomes: Collection[str]) -> list[bool]:
    """Return for each leaf whether its start, its end or an act has one of these outcomes. [L]"""
    shown = tree.nodes[0].observation
    if shown and shown.outcome in outcomes:
        return [True] * len(tree.leaves)
    return [
        any(outcome in outcomes for outcome in (trajectory[-1].outcome, *acts(trajectory)))
        for trajectory in tree.trajectories()
    ]


def spliced(leaves: Sequence[tuple[Tree, int]]) -> Tree:
    """Return a tree with one leaf of each of these trees, all of one question and prompt. [L]

    ``leaves``: a tree and the number of its leaf. No two of them share a node but the prompt, as
    where nothing branched.
    """
    first, _ = leaves[0]
    new = Tree(first.question, [first.nodes[0]])
    for tree, leaf in leaves:
        parent = 0
        for index in tree.path(tree.leaves[leaf])[1:]:
            new.nodes.append(replace(tree.nodes[index], parent=parent))
            parent = len(new.nodes) - 1
        new.leaves.append(parent)
    return new


def results_of(stored: Sequence[Mapping[str, str]] | None) -> tuple[CallResult, ...]:
    """Return the results of a turn from their rows; None: a table of an earlier release."""
    return () if stored is None else tuple(CallResult(**each) for each in stored)


def calls_of(
    results: Sequence[CallResult], read: Sequence[Call], outcome: str, text: str
) -> list[CallResult]:
    """Return the executed calls of a turn, each with its argument and text.

    ``read``: the calls that a dialect finds in the turn's text; ``outcome`` and ``text`` are those
    of the node that answers the turn. Where nothing is known of a call, its tool is "".
    """
    if len(results) > 1:
        return list(results)
    call = read[0] if read else Call("", "")
    known = results[0] if results else CallResult("", call.tool, outcome)
    return [replace(known, argument=call.argument, text=text or known.text)]


def acts_of(turn: Node, after: Node | None) -> list[str]:
    """Return the outcomes of the executed acts of a turn; ``after``: the next node, if any.

    In trees of earlier releases, the tool result or the fresh prompt after a turn has the outcome
    of its only act. A last act has none after it. A turn that was no act can have an observation,
    too: a last reward.
    """
    if turn.results:
        return [result.outcome for result in turn.results]
    if after is not None and after.kind != TURN:
        return [after.outcome]
    return [turn.observation.outcome] if turn.outcome in ACTED and turn.observation else []


def observed_before(trajectory: Sequence[Node]) -> list[str]:
    """Return the key of the state that each turn acted on. [E]

    That is the observation before it, where an environment made one (in a prompt it is not alone),
    else the text before it: the question or a tool result.
    """
    seen: Observation | None = trajectory[0].observation
    keys = []
    for before, turn in pairwise(trajectory):
        if turn.kind == TURN:
            keys.append(before.text if seen is None else seen.key)
            seen = turn.observation
    return keys


def program_said(trajectory: Sequence[Node]) -> Mapping[str, Any] | None:
    """Return what the program of a trajectory has returned: answer, reward, parts; or its fault.

    None for a trajectory that no program has led.
    """
    last = trajectory[-1].observation
    said = None if last is None else last.info.get(PROGRAM)
    return said if isinstance(said, Mapping) else None


def step_rewards(trajectory: Sequence[Node]) -> list[float]:
    """Return the environment's reward for each turn, 0 for questions with tools. [E]"""
    return [turn.observation.reward if turn.observation else 0.0 for turn in sampled(trajectory)]

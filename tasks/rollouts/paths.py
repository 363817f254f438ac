"""The paths of a tree while they grow: how they start, what they ask the engine for, how they fork.

A path has a handle of the engine's session and one of the environment's: an episode.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from params.schema.agent import Dialogue
from params.schema.algorithms import Marks
from params.schema.reinforce import Rollout
from tasks.dialects.contract import Dialect, Exchange
from tasks.dialects.observation_text import shown_text
from tasks.engines import SamplingRequest, SamplingSession
from tasks.environments.contract import OpenEnvironment, Session
from tasks.trees.tree import PROMPT, Node, Observation, Question, Tree

NOTHING: NDArray[np.float32] = np.zeros(0, np.float32)
NO_MARKS = Marks(kind="none")
NO_TOKENS: NDArray[np.int32] = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Setting:
    """What all rollouts of one call share."""

    tokenizer: Any
    dialogue: Dialogue
    rollout: Rollout
    dialect: Dialect
    environment: OpenEnvironment
    seed: str  # of this batch: run seed and iteration
    branching: str = "none"  # none, marks, entropy: of a row of params/algorithms.yaml
    marks: Marks = NO_MARKS  # where trajectories may branch, if at marks
    policy_steps: int = 0  # optimizer steps that the policy has taken


@dataclass
class LiveTrajectory:
    """One trajectory while it grows."""

    tree: Tree
    siblings: list[LiveTrajectory]  # all paths of the tree, in the order they were started
    index: int  # its own place there
    node: int  # the node that its next turn follows
    handle: int  # of the engine's session
    episode: int  # of the environment's session
    tokens: NDArray[np.int32]  # from the last prompt to ``node``, and the head
    response: int = 0  # tokens of turns and results so far
    calls: int = 0  # tool calls, or acts in an environment, that were executed
    turns: int = 0
    initial_entropy: float | None = None  # of its first turn; a branch inherits its parent's
    judged: int | None = None  # the observation before a turn that is not judged yet
    # beginning of its next turn, shared with its parent's
    head: NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS)
    head_text: str = ""
    past: tuple[Exchange, ...] = ()  # its turns that acted, with all of ``calls``
    failed: Observation | None = None  # why its episode could not start
    live: bool = True
    waits: bool = False  # keeps its handle after its end, since it may branch at marks

    @property
    def has_state(self) -> bool:
        """Return whether it acts in an environment with a state."""
        return self.tree.nodes[0].observation is not None


@dataclass(frozen=True)
class Lane:
    """What the trees that grow side by side use."""

    sampling: SamplingSession
    episodes: Session
    setting: Setting
    context: int  # most tokens of a path, prompt included

    def request(self, path: LiveTrajectory) -> SamplingRequest:
        """Return what the engine is asked for: the path's next turn."""
        left = self.setting.dialogue.turn_tokens - len(path.head)
        seed = seed_of(path, "turn", path.turns, self.setting)
        return SamplingRequest(path.handle, path.tokens, seed, min(left, self.room(path)))

    def room(self, path: LiveTrajectory) -> int:
        """Return the tokens that are left of the path's response and of its context."""
        left = self.setting.dialogue.response_tokens - path.response
        return min(left, self.context - len(path.tokens))

    def start(
        self, tree: Tree, siblings: list[LiveTrajectory], begun: Sequence[Begun], waits: bool
    ) -> None:
        """Start a trajectory at the prompt for each episode that has begun."""
        prompt, shown = tree.nodes[0].tokens, tree.nodes[0].observation
        for episode, observation in begun:
            # An episode that the prompt does not show cannot be acted in, though it may have begun.
            ended = (seen for seen in (observation, shown) if seen and seen.ends)
            over = next(ended, None)
            siblings.append(
                LiveTrajectory(
                    tree,
                    siblings,
                    len(siblings),
                    0,
                    self.sampling.open(),
                    episode,
                    prompt,
                    failed=over,
                    waits=waits,
                )
            )

    def fork(
        self, path: LiveTrajectory, node: int, tokens: NDArray[np.int32], acted: int, **changes: Any
    ) -> None:
        """Start a path that shares its beginning with ``path``, up to ``node``.

        ``tokens``: those of the shared beginning from the last prompt on; ``acted``: its turns that
        acted. The decision belongs to this place, so the branch's own first turn is not judged
        again. ``changes``: what else differs.
        """
        shared = [path.tree.nodes[index] for index in path.tree.path(node)]
        past = path.past[:acted]
        acts = sum(len(exchange.calls) for exchange in past)
        branch = replace(
            path,
            index=len(path.siblings),
            node=node,
            handle=self.sampling.fork(path.handle),
            episode=self.episodes.fork(path.episode, acts),
            tokens=tokens,
            response=sum(len(part.tokens) for part in shared if part.kind != PROMPT),
            calls=acts,
            past=past,
            judged=None,
            live=True,
            **changes,
        )
        path.siblings.append(branch)

    def close(self, path: LiveTrajectory) -> None:
        """Release the path's handles."""
        self.sampling.close(path.handle)
        self.episodes.close(path.episode)


Begun = tuple[int, Observation | None]  # an episode: its handle and its first observation


def root(question: Question, begun: Sequence[Begun], setting: Setting) -> Tree:
    """Return a tree that has only its prompt, with what the first episode that has begun shows."""
    seen = [observation for _, observation in begun]
    observation = next((each for each in seen if not (each and each.ends)), seen[0])
    observation = shown_first(question, observation, setting)
    shown = shown_text((), observation, setting.dialogue) if observation else ""
    tokens = setting.dialect.prompt(question, shown)
    text = "\n\n".join(filter(None, [question.text, shown]))
    return Tree(question, [Node(-1, PROMPT, "", text, tokens, NOTHING, NOTHING, observation)])


def shown_first(
    question: Question, seen: Observation | None, setting: Setting
) -> Observation | None:
    """Return a first observation whose text is cut to the room of an observation in the prompt.

    That is ``result_tokens``, in a fresh prompt what is left of ``prompt_tokens``. Raises
    ValueError where not even the admissible actions have room: no agent can do such a task.
    """
    if seen is None:
        return None
    dialogue, dialect = setting.dialogue, setting.dialect
    room = len(dialect.prompt(question)) + dialogue.result_tokens
    most = room if dialogue.prompt_tokens is None else dialogue.prompt_tokens

    def fits(observation: Observation) -> bool:
        return len(dialect.prompt(question, shown_text((), observation, dialogue))) <= most

    def cut(characters: int) -> Observation:
        return replace(seen, text=seen.text[:characters] + "...")

    if fits(seen):
        return seen
    if not fits(cut(0)):
        key = "result_tokens" if dialogue.prompt_tokens is None else "prompt_tokens"
        raise ValueError(
            f"question {question.id}: the first observation has no room in the prompt, however far "
            f"its text is cut: raise dialogue.{key}, which is {getattr(dialogue, key)}, or let the "
            "world show fewer actions"
        )
    lengths = range(len(seen.text))
    return cut(max(0, bisect_right(lengths, False, key=lambda length: not fits(cut(length))) - 1))


def context_of(trees: Sequence[Tree], dialogue: Dialogue) -> int:
    """Return the most tokens of a path of these trees, prompt included."""
    longest = max(len(tree.nodes[0].tokens) for tree in trees)
    if dialogue.prompt_tokens is None:
        return longest + dialogue.response_tokens
    return max(longest, dialogue.prompt_tokens) + dialogue.turn_tokens


def context_tokens(tree: Tree, node: int) -> NDArray[np.int32]:
    """Return the tokens from the last prompt to the end of ``node``."""
    return np.concatenate([tree.nodes[index].tokens for index in tree.contexts(node)[-1]])


def seed_of(path: LiveTrajectory, purpose: str, count: int, setting: Setting) -> int:
    """Return the seed of a draw: from run, iteration, question, path, and number of the draw."""
    words = (setting.seed, path.tree.question.id, str(path.index), purpose, str(count))
    return int.from_bytes(hashlib.blake2b("/".join(words).encode(), digest_size=8).digest())

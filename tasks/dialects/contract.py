"""The contract of a dialect: how prompts, turns and observations are written as tokens and read.

Token ids stay token ids: what an agent has sampled is never encoded again. A user's file imports
what it needs from ``beamline.dialects``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from params.schema.agent import Dialogue
from params.schema.base import Frozen
from tasks.trees.tree import Call, Observation, Question, ToolSpec

Tokens = NDArray[np.int32]
Context = tuple[Tokens, NDArray[np.bool_]]  # tokens [T], and which are the agent's own [T]


@dataclass(frozen=True)
class Turn:
    """A turn that has been read."""

    outcome: str  # an Outcome of a turn
    call: Call | None = None  # where it ends with one
    said: str = ""  # the text without thoughts and calls: of an answer, or of a free act


@dataclass(frozen=True)
class Exchange:
    """A turn of the past and what answered it, for a prompt that is rendered anew."""

    turn: Tokens
    text: str
    call: Call
    observation: Observation


class Dialect(Protocol):
    """A dialect for one tokenizer, one recipe's ``dialogue`` and one set of tools."""

    stop_strings: tuple[str, ...]  # each ends a turn, beside the end token

    def prompt(self, question: Question, shown: str = "") -> Tokens:
        """Return the tokens before the agent's first turn.

        ``shown``: what the environment shows at the start, after the question's text.
        """

    def read(self, prompt: Tokens, turn: Tokens, text: str, stopped: str) -> Turn:
        """Read a whole turn: tokens and text (without the end token), and why it stopped.

        ``prompt``: all tokens before the turn.
        """

    def observe(
        self, prompt: Tokens, turn: Tokens, call: Call, observation: Observation, limit: int
    ) -> tuple[str, Tokens] | None:
        """Return text and tokens that follow the turn: what the agent reads, up to its next turn.

        At most ``limit`` tokens, the end of a longer text being cut, unless the marks around it
        alone need more. None where the dialect cannot go on from these tokens; then ``restart``.
        """

    def restart(self, question: Question, shown: str, past: Sequence[Exchange]) -> Tokens:
        """Return a new prompt with the whole dialogue so far, where ``observe`` has returned None.

        Raises NotImplementedError in a dialect whose ``observe`` never does.
        """

    def answer(self, turns: Sequence[str]) -> str | None:
        """Return the final answer in the texts of an agent's turns, or None."""

    def faults(self, turns: Sequence[str], outcome: str) -> list[str]:
        """Return the names of what is wrong with the form of a response; [] for nothing."""

    def call(self, turn: str) -> Call | None:
        """Return the tool call in the text of a turn, or None."""

    def trace(
        self, question: Question, parts: Sequence[tuple[str, bool]], shown: str = ""
    ) -> list[Context]:
        """Return the contexts of a written trajectory, as a rollout that says the same has them.

        A second context begins where ``observe`` returns None. Every token of every turn is the
        agent's own in one context. ``parts`` alternate between a turn in tags (turn, True), as
        experts write them, and an observation (text, False).
        """


def contexts_of(
    dialect: Dialect, question: Question, parts: Sequence[tuple[str, bool]], shown: str = ""
) -> list[Context]:
    """Return ``dialect.trace``; a user's dialect may return its only context alone."""
    written = dialect.trace(question, parts, shown)
    return [written] if isinstance(written, tuple) else written


@dataclass(frozen=True)
class DialectKind:
    """A kind of dialect: its settings in a recipe, and how to open it.

    ``open(settings, tokenizer, dialogue, specs)``. ``faults(settings)`` returns one line for each
    setting that cannot work. ``tags`` are texts that a tiny policy's tokenizer should have as
    single tokens, given the names of the tools. ``serving(settings, dialect)`` returns what an
    inference server needs to speak an open dialect, as values of JSON; it is published with a
    policy.
    """

    settings: type[Frozen]
    open: Callable[[Any, Any, Dialogue, Sequence[ToolSpec]], Dialect]
    faults: Callable[[Any], list[str]] = lambda settings: []
    tags: Callable[[Sequence[str]], tuple[str, ...]] = lambda tools: ()
    serving: Callable[[Any, Any], dict[str, Any]] = lambda settings, dialect: {}

"""The contract of a dialect: how prompts, turns and observations are written as tokens and read.

Token ids stay token ids: what an agent has sampled is never encoded again. A user's file imports
what it needs from ``beamline.dialects``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from params.schema.agent import Dialogue
from params.schema.base import Frozen
from tasks.trees.tree import Call, Observation, Question, ToolSpec, joined

Tokens = NDArray[np.int32]
Context = tuple[Tokens, NDArray[np.bool_]]  # tokens [T], and which are the agent's own [T]


@dataclass(frozen=True)
class Turn:
    """A turn that has been read. A single call may be given alone, and None for no call."""

    outcome: str  # an Outcome of a turn
    calls: tuple[Call, ...] = ()  # with which it ends, in their order
    said: str = ""  # the text without thoughts and calls: of an answer, or of a free act

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", several(self.calls))

    @property
    def call(self) -> Call | None:
        """Return the first of its calls, or None."""
        return self.calls[0] if self.calls else None


@dataclass(frozen=True)
class Exchange:
    """A turn of the past and what answered it, for a prompt that is rendered anew.

    ``calls`` are those that were executed, each with its observation. One may be given alone.
    """

    turn: Tokens
    text: str
    calls: tuple[Call, ...]
    observations: tuple[Observation, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", several(self.calls))
        object.__setattr__(self, "observations", several(self.observations))

    @property
    def call(self) -> Call:
        """Return the first call."""
        return self.calls[0]

    @property
    def observation(self) -> Observation:
        """Return what answered the turn as one observation."""
        return joined(self.observations)


class Dialect(Protocol):
    """A dialect for one tokenizer, one recipe's ``dialogue`` and one set of tools.

    It may have two more methods. ``call_id(tool, number)`` returns the id of a dialogue's call
    number ``number``, from 0, where the agent writes none; without it, ids are ``call_0``,
    ``call_1``, ... ``texts``, with the arguments of ``observe``, returns what the agent reads of
    each observation, without marks around it; without it, that is the observation's whole text.
    """

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
        self,
        prompt: Tokens,
        turn: Tokens,
        calls: Sequence[Call],
        observations: Sequence[Observation],
        limit: int,
    ) -> tuple[str, Tokens] | None:
        """Return text and tokens that follow the turn: what the agent reads, up to its next turn.

        ``calls``: all of the turn, each with its id; ``observations``: one each. Each is written in
        at most ``limit`` tokens, the end of a longer text being cut, unless the marks around it
        alone need more. None where the dialect cannot go on from these tokens; then ``restart``.

        A dialect without a parameter ``calls``, as of earlier versions, is given the only call and
        observation of a turn, ``call`` and ``observation``; with it, a turn of several calls is a
        BAD_CALL. A dialect whose ``read`` returns one call at most is never given more.
        """

    def restart(self, question: Question, shown: str, past: Sequence[Exchange]) -> Tokens:
        """Return a new prompt with the whole dialogue so far, where ``observe`` has returned None.

        Raises NotImplementedError in a dialect whose ``observe`` never does.
        """

    def answer(self, turns: Sequence[str]) -> str | None:
        """Return the final answer in the texts of an agent's turns, or None."""

    def faults(self, turns: Sequence[str], outcome: str) -> list[str]:
        """Return the names of what is wrong with the form of a response; [] for nothing."""

    def calls(self, turn: str) -> tuple[Call, ...]:
        """Return the tool calls in the text of a turn.

        A dialect of earlier versions has ``call`` in its place, which returns one, or None.
        """

    def trace(
        self, question: Question, parts: Sequence[tuple[str, bool]], shown: str = ""
    ) -> list[Context]:
        """Return the contexts of a written trajectory, as a rollout that says the same has them.

        A second context begins where ``observe`` returns None. Every token of every turn is the
        agent's own in one context. ``parts`` alternate between a turn in tags (turn, True), as
        experts write them, and an observation (text, False). A turn with several calls has as many
        observations after it.
        """


def several(given: Any) -> tuple[Any, ...]:
    """Return calls or observations as a tuple; one may be given alone, and None for none."""
    if given is None:
        return ()
    return (given,) if isinstance(given, Call | Observation) else tuple(given)


def takes_several(dialect: Any) -> bool:
    """Return whether a dialect writes what answers several calls: ``observe`` takes ``calls``."""
    parameters = signature(dialect.observe).parameters.values()
    return any(each.name == "calls" or each.kind == each.VAR_POSITIONAL for each in parameters)


def observed(
    dialect: Dialect, prompt: Tokens, turn: Tokens, exchange: Exchange, limit: int
) -> tuple[str, Tokens] | None:
    """Return what ``dialect.observe`` writes for a turn that is answered."""
    given: tuple[Any, Any] = (exchange.calls, exchange.observations)
    if not takes_several(dialect):
        given = (exchange.call, exchange.observation)
    return dialect.observe(prompt, turn, *given, limit)


def calls_in(reader: Any, turn: str) -> tuple[Call, ...]:
    """Return the calls that a dialect, or a reader of turns, finds in the text of a turn."""
    read = getattr(reader, "calls", None) or reader.call
    return several(read(turn))


def numbered(dialect: Any, calls: Sequence[Call], before: int) -> tuple[Call, ...]:
    """Return calls with an id each, after ``before`` earlier ones of their dialogue."""
    name = getattr(dialect, "call_id", None) or (lambda tool, number: f"call_{number}")
    return tuple(
        call if call.id else replace(call, id=name(call.tool, number))
        for number, call in enumerate(calls, start=before)
    )


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
    policy. ``several_calls``: whether a turn of a written trace may make several calls, which
    ``trace`` then takes.
    """

    settings: type[Frozen]
    open: Callable[[Any, Any, Dialogue, Sequence[ToolSpec]], Dialect]
    faults: Callable[[Any], list[str]] = lambda settings: []
    tags: Callable[[Sequence[str]], tuple[str, ...]] = lambda tools: ()
    serving: Callable[[Any, Any], dict[str, Any]] = lambda settings, dialect: {}
    several_calls: bool = False

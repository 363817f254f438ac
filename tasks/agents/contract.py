"""The contract of an agent without training: a generator that asks a model and acts.

An agent yields what it wants, and is sent what comes of it:

    ChatRequest   ChatReply            the policy's answer
    Condense      ChatReply            what the model that condenses makes of documents
    Call          Observation          the result of a tool, or a step of the world
    NewTrial      Observation | None   what a fresh episode of the same task shows first

It returns its answer to a question, or None. It opens nothing and counts no tokens: running.py
runs many agents side by side, and holds each to its limits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from params.schema.agent import Dialogue
from tasks.chat.contract import ChatRequest
from tasks.trees.dialogue import actions_line
from tasks.trees.tree import Call, Message, Observation, Question, ToolSpec

SNIPPETS, FULL, CONDENSED = "snippets", "full", "condensed"  # how pages enter an agent's context
PAGES = (SNIPPETS, FULL, CONDENSED)
SEARCHES = ("search", "http_search")  # tools that find documents for words
BROWSER = "browser"  # the tool that opens a page
SPENT = "budget"  # finish of a reply that was not sampled, as the trial's tokens are spent
CHARACTERS = 4  # of a token, for texts that are cut without a tokenizer


@dataclass(frozen=True)
class CondenseRequest:
    """A request to the model that condenses, which may be another one than the policy."""

    request: ChatRequest


@dataclass(frozen=True)
class NewTrial:
    """A wish to begin the task again, with all limits as at the start."""


Wanted = ChatRequest | CondenseRequest | Call | NewTrial
# Sent: ChatReply, Observation or None, as the table above says.
Steps = Generator[Wanted, Any, str | None]


@dataclass(frozen=True)
class Limits:
    """What one trial may spend. Tokens are sampled ones."""

    turns: int  # requests of an agent's main loop
    tool_calls: int  # or acts in a world
    turn_tokens: int  # of one reply, at most
    response_tokens: int  # of all replies of a trial, at most
    result_characters: int  # of one tool result, at most

    @classmethod
    def of(cls, dialogue: Dialogue) -> Limits:
        """Return the limits of a recipe's section ``dialogue``.

        **Chosen**: twice as many turns as tool calls and an answer need, so that an agent can
        correct an action that could not be read.
        """
        return cls(
            turns=2 * (dialogue.tool_calls + 1),
            tool_calls=dialogue.tool_calls,
            turn_tokens=dialogue.turn_tokens,
            response_tokens=dialogue.response_tokens,
            result_characters=CHARACTERS * dialogue.result_tokens,
        )


@dataclass(frozen=True)
class Task:
    """One task, and what its agent works with."""

    question: Question
    specs: Sequence[ToolSpec]
    prompts: Mapping[str, str]  # by name, as prompts.py reads them
    limits: Limits
    temperature: float
    top_p: float
    pages: str = SNIPPETS
    system: str = ""  # the recipe's own message, for a policy that was trained with it
    trials: int = 1  # of agents that try again
    # Whether an answer is right, where the gold answer may decide on another trial.
    oracle: Callable[[str | None], bool] | None = None
    first: Observation | None = None  # what the world shows at the start; None: a single question

    def request(self, messages: Sequence[Message], stop: Sequence[str] = ()) -> ChatRequest:
        """Return a request for one turn; running.py gives it a seed."""
        return ChatRequest(
            messages=tuple(messages),
            max_tokens=self.limits.turn_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=tuple(stop),
        )

    @property
    def search(self) -> ToolSpec | None:
        """Return the first tool that finds documents, or None."""
        return next((spec for spec in self.specs if spec.name in SEARCHES), None)

    def offers(self, name: str) -> bool:
        """Return whether the agent has a tool of this name."""
        return any(spec.name == name for spec in self.specs)

    def shown(self, observation: Observation) -> str:
        """Return what an agent reads of an observation: its text, cut, and the admissible acts."""
        text, most = observation.text.strip(), self.limits.result_characters
        cut = text if len(text) <= most else f"{text[:most].rstrip()}..."
        return cut + actions_line(observation)


@dataclass(frozen=True)
class AgentKind:
    """A kind of agent: how it works, the prompts that it fills, and what it needs."""

    steps: Callable[[Task], Steps]
    prompts: Mapping[str, frozenset[str]]  # name -> placeholders, all of which must be there
    in_worlds: bool = False  # whether it can act in an environment with a state
    needs_search: bool = False
    in_tags: bool = False  # whether it is for a policy that has learned to call tools in tags
    retries: bool = False  # whether it tries again


def system(text: str) -> list[Message]:
    """Return the system message before a prompt; none for an empty one."""
    return [Message("system", text)] if text else []


def user(text: str) -> Message:
    """Return a message of the user."""
    return Message("user", text)


def assistant(text: str) -> Message:
    """Return a message of the agent."""
    return Message("assistant", text)

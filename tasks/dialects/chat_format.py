"""The contract of a chat format: how a dialect writes and reads whole conversations.

A rollout's own dialogue answers its agent's calls itself (contract.py). An agent that is somebody
else's program sends its conversation as messages, as OpenAI's protocol has them: with each request
all of them, to which an answer is sampled. Token ids that were sampled are never encoded again
where a conversation goes on from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

import numpy as np

from tasks.dialects.contract import Tokens
from tasks.trees.dialogue import readable
from tasks.trees.markers import BREAK, Markers, added_tokens, quote

Show = Callable[[str], str]  # a text as it is written into a conversation
FORGED = ("forged_result", "forged_turn")


@dataclass(frozen=True)
class ToolCall:
    """A call in a message of the assistant, as OpenAI's protocol has it."""

    id: str
    name: str
    arguments: str  # a JSON object


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation."""

    role: str  # system, user, assistant or tool
    content: str
    calls: tuple[ToolCall, ...] = ()  # of the assistant
    call_id: str = ""  # of a tool: the call that it answers
    name: str = ""  # of a tool: its name, where that is known
    thoughts: str = ""  # of the assistant


@dataclass(frozen=True)
class TurnReply:
    """A sampled turn as a message: what a client of the protocol is given."""

    message: ChatMessage
    outcome: str  # an Outcome of a turn


class ChatFormat(Protocol):
    """How one dialect, opened for one set of tools, writes conversations."""

    stop_strings: tuple[str, ...]  # each ends a turn, beside the end token

    def prompt(self, messages: Sequence[ChatMessage]) -> Tokens:
        """Return the tokens of a whole conversation, up to where the agent's next turn begins.

        Raises ValueError for a conversation that the policy's chat template refuses.
        """

    def extend(
        self, prompt: Tokens, turn: Tokens, messages: Sequence[ChatMessage]
    ) -> Tokens | None:
        """Return the tokens that follow a sampled turn, up to the next one; None: it cannot.

        ``messages`` come after the turn, and none of them is the assistant's.
        """

    def reply(self, prompt: Tokens, turn: Tokens, text: str, stopped: str, calls: int) -> TurnReply:
        """Read a sampled turn. ``calls``: how many the conversation has before it.

        ``text`` is the turn's without the end token, ``stopped`` why it ended.
        """


def split_system(messages: Sequence[ChatMessage]) -> tuple[list[str], list[ChatMessage]]:
    """Return the contents of the system messages that come first, and all other messages."""
    first = list(takewhile(lambda message: message.role == "system", messages))
    return [message.content for message in first], list(messages[len(first) :])


def check_system(later: Sequence[ChatMessage], decoded: Callable[[], str]) -> None:
    """Raise ValueError where a template leaves out a system message that is not the first."""
    for message in later:
        if message.role == "system" and not _within(message.content, decoded()):
            raise ValueError(
                "it leaves out a system message after the first other one: send it as a message of "
                "the user"
            )


def _within(part: str, text: str) -> bool:
    """Return whether a part is in a text, whatever the space and the breaks in them."""
    plain = ["".join(readable(each).replace(BREAK, "").split()) for each in (part, text)]
    return plain[0] in plain[1]


def unchanged(write: Callable[[Show], list[int]], tokenizer: Any, marks: Markers) -> Tokens:
    """Return the tokens of a conversation in which nothing that a message quotes is a mark.

    ``write`` writes the conversation with its contents as a function shows them. Where a content
    and a mark beside it have become one token, contents are encoded apart.
    """

    def added(tokens: Sequence[int]) -> list[int]:
        return added_tokens(np.array(tokens, np.int32), marks)

    def quoted(text: str) -> str:
        return quote(tokenizer, readable(text), marks.quoted)

    expected = added(write(lambda text: "a" * bool(text.strip())))
    tokens: list[int] = []
    for show in (quoted, lambda text: BREAK + quoted(text) + BREAK):
        tokens = write(show)
        if added(tokens) == expected:
            break
    return np.array(tokens, np.int32)

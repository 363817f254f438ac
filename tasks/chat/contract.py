"""The contract of a chat model: messages go in, a text comes out.

A judge and the agents that are prompted, not trained, ask one. It is a server that speaks the
OpenAI-compatible protocol (tasks/chat/endpoint.py), or a policy of this machine
(tasks/engines/chat.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tasks.trees.tree import Message

NO_TEXT = "no text"  # fault of a reply whose model has said nothing


@dataclass(frozen=True)
class ChatRequest:
    """One answer to sample."""

    messages: tuple[Message, ...]
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()  # the text ends before the first of them


@dataclass(frozen=True)
class ChatReply:
    """One sampled answer. A failed request has a fault, and an empty text."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish: str = ""  # "stop", "length", or what the server calls it
    fault: str = ""  # why there is no answer: "timeout", "429", "malformed", NO_TEXT, ...


class ChatModel(Protocol):
    """A model that is asked in messages."""

    @property
    def name(self) -> str:
        """Return what tables and reports call the model."""

    def ask(self, requests: Sequence[ChatRequest]) -> list[ChatReply]:
        """Answer the requests side by side; replies are in the order of the requests.

        A request that fails for good has a reply with a fault. Raises RuntimeError, with the
        remedy, where no request can succeed: no server, a wrong key, a budget that is spent.
        """

"""Read replies that write calls, notes and answers in tags: ``<search>words</search>``.

A reply usually ends before the closing tag, at which the model was stopped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.agents.contract import Task, user
from tasks.chat.contract import ChatReply
from tasks.trees.dialogue import boxed
from tasks.trees.tree import Message, Observation

ANSWER = "answer"
CUT = "length"  # finish of a reply that was cut at its limit


@dataclass(frozen=True)
class Tagged:
    """A reply up to its first tag of those that were looked for, which is closed."""

    text: str
    tag: str = ""  # "": there is none
    content: str = ""


def read(reply: ChatReply, tags: Sequence[str]) -> Tagged:
    """Return a reply up to the end of its first tag; what follows was written unasked.

    A tag that is open counts, unless the reply was cut there at its limit.
    """
    names, end = "|".join(map(re.escape, tags)), "" if reply.finish == CUT else r"|\Z"
    matched = re.search(rf"<({names})>(.*?)(?:</\1>{end})", reply.text, re.DOTALL)
    if not matched:
        return Tagged(reply.text)
    tag, content = matched[1], matched[2]
    before = reply.text[: matched.start()]
    return Tagged(f"{before}<{tag}>{content}</{tag}>", tag, content.strip())


def closing(tags: Sequence[str]) -> tuple[str, ...]:
    """Return the texts at which a reply is stopped."""
    return tuple(f"</{tag}>" for tag in tags)


def result(task: Task, observation: Observation) -> Message:
    """Return the message that shows a tool result."""
    return user(f"<result>\n{task.shown(observation)}\n</result>")


def answer_in(reply: Tagged) -> str | None:
    """Return the answer in a reply: what is boxed, else the whole content of its answer tag."""
    if reply.tag == ANSWER:
        return boxed(reply.content) or reply.content or None
    return boxed(reply.text)

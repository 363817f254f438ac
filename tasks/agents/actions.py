"""Read actions that are written on a line of their own: ``Action: search[words]``, and play them.

ReAct's form (arXiv 2210.03629). In a world whose acts are free text, the line is the act.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.agents import pages
from tasks.agents.contract import SPENT, Task, Wanted, assistant, user
from tasks.environments.contract import FREE_TEXT
from tasks.trees.dialogue import boxed, first_text
from tasks.trees.tree import Call, Message, Observation, ToolSpec

STOP = ("\nObservation:",)  # only the tools write observations
FINISH = "finish"
MARK = re.compile(r"^[ \t*]*Action(?: \d+)?[ \t*]*:[ \t*]*", re.MULTILINE | re.IGNORECASE)
NEXT = re.compile(r"^[ \t*]*(?:Action|Thought|Observation)\b[^\n:]*:", re.MULTILINE | re.IGNORECASE)
NAMED = re.compile(r"([\w-]+)[ \t]*\[(.*)\]", re.DOTALL)


@dataclass(frozen=True)
class ParsedReply:
    """A reply up to the end of its first action; neither call nor answer where there is none."""

    text: str
    call: Call | None = None
    answer: str | None = None


@dataclass(frozen=True)
class Trial:
    """One try at a task: the answer, what was written and read, and what was observed."""

    answer: str | None
    transcript: tuple[Message, ...]  # without the prompt
    seen: tuple[Observation, ...]


def read(reply: str, specs: Sequence[ToolSpec], marked: bool = True) -> ParsedReply:
    """Return the first action in a reply; what follows it was written unasked.

    ``marked``: an action stands after "Action:"; else the whole reply may be one.
    """
    mark = MARK.search(reply)
    if mark is None and marked:
        return ParsedReply(reply)
    start = mark.end() if mark else len(reply) - len(reply.lstrip())
    following = NEXT.search(reply, start)
    body = reply[start : following.start() if following else len(reply)]
    line = body.partition("\n")[0].strip()
    names = {spec.name for spec in specs}
    # An argument may have several lines, such as a program: then the first line is not whole.
    whole = line.count("[") == line.count("]")
    matched = (whole and NAMED.fullmatch(line)) or NAMED.match(body)
    if matched and matched[1].lower() == FINISH:
        return ParsedReply(
            _up_to(reply, start, matched[0]), answer=boxed(matched[2]) or matched[2].strip()
        )
    if matched and matched[1] in names - {FREE_TEXT.name}:
        return ParsedReply(_up_to(reply, start, matched[0]), Call(matched[1], matched[2].strip()))
    if line and FREE_TEXT.name in names:
        return ParsedReply(_up_to(reply, start, line), Call(FREE_TEXT.name, line))
    return ParsedReply(reply)


def _up_to(reply: str, start: int, action: str) -> str:
    """Return a reply up to the end of an action that is at ``start``, spaces aside."""
    return reply[: reply.index(action, start) + len(action)]


def described(specs: Sequence[ToolSpec]) -> str:
    """Return a line for each tool: how a call is written, and what it does."""
    return "\n".join(f"{_form(spec)}: {spec.description}" for spec in specs)


def _form(spec: ToolSpec) -> str:
    if spec.name == FREE_TEXT.name:
        return "<the act>"
    if spec.text_parameter:
        return f"{spec.name}[{spec.text_parameter}]"
    inside = ", ".join(f'"{name}": ...' for name in spec.parameters.get("properties", {}))
    return f"{spec.name}[{{{inside}}}]"


def shown_question(task: Task) -> str:
    """Return the text of a task, with what its world shows at the start."""
    return "\n\n".join(filter(None, [task.question.text, first_text(task.first)]))


def play(task: Task, prompt: str, marked: bool = True) -> Generator[Wanted, Any, Trial]:
    """Ask for one action after the other until the agent finishes, the world ends or turns run out.

    A reply without an action is answered by the prompt ``unread``, and takes a turn.
    """
    transcript: list[Message] = []
    seen: list[Observation] = []
    for _ in range(task.limits.turns):
        reply = yield task.request([user(prompt), *transcript], STOP)
        if reply.finish == SPENT:
            break
        action = read(reply.text, task.specs, marked)
        transcript.append(assistant(action.text))
        if action.answer is not None:
            return Trial(action.answer, tuple(transcript), tuple(seen))
        if action.call is None:
            transcript.append(_observed(task.prompts["unread"]))
            continue
        observation = yield from pages.act(task, action.call)
        seen.append(observation)
        transcript.append(_observed(task.shown(observation)))
        if observation.ends:
            break
    return Trial(None, tuple(transcript), tuple(seen))


def _observed(text: str) -> Message:
    return user(f"Observation: {text}")

"""Read the turns that experts write, which are in tags whatever the dialect of the policy."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tasks.trees import dialogue as talk
from tasks.trees.tree import Call

THOUGHT = re.compile("<think>(.*?)</think>", re.DOTALL)


def in_tags(turn: str, tools: Sequence[str]) -> tuple[str, Call | None, str]:
    """Return thoughts, call and what else is said in a turn in tags, the answer without its."""
    thoughts = "\n\n".join(thought.strip() for thought in THOUGHT.findall(turn))
    return thoughts, talk.read_call(turn, tools), said(turn, tools)


def answered_turns(parts: Sequence[tuple[str, bool]]) -> list[tuple[str, list[str]]]:
    """Return each turn of a written trajectory with what answers its calls, without result tags."""
    turns: list[tuple[str, list[str]]] = []
    for text, is_turn in parts:
        if is_turn:
            turns.append((text, []))
        else:
            turns[-1][1].append(text.removeprefix("<result>").removesuffix("</result>"))
    return turns


def said(turn: str, tools: Sequence[str]) -> str:
    """Return a turn's text without thoughts, calls and the tags of its answer."""
    hidden = rf"<(think|{talk.any_tool(tools)})>.*?</\1>"
    spoken = re.sub(hidden, "", turn, flags=re.DOTALL)
    return re.sub("</?answer>", "", spoken).strip()

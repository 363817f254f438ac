"""react: thought, action, observation, in turn (ReAct, arXiv 2210.03629)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from tasks.agents import pages
from tasks.agents.actions import Trial, described, play, shown_question
from tasks.agents.contract import AgentKind, Steps, Task, Wanted
from tasks.agents.prompts import fill

PROMPTS = {
    "react": frozenset({"question", "tools"}),
    "react_world": frozenset({"question", "tools"}),
    "unread": frozenset(),
    **pages.PAGE,
}


def steps(task: Task) -> Steps:
    """Try once."""
    return (yield from trial(task)).answer


def trial(task: Task, before: Sequence[str] = ()) -> Generator[Wanted, Any, Trial]:
    """Try the task. ``before``: texts that stand before the prompt, such as earlier lessons."""
    name = "react" if task.first is None else "react_world"
    prompt = fill(task.prompts[name], question=shown_question(task), tools=described(task.specs))
    return (yield from play(task, "\n\n".join([*before, prompt])))


AGENT = AgentKind(steps, PROMPTS, in_worlds=True)

"""bare: the question alone, for a policy that was trained to call its tools in tags.

What training has reached, beside the agents that a prompt makes of the same policy.
"""

from __future__ import annotations

from tasks.agents import pages
from tasks.agents.actions import shown_question
from tasks.agents.contract import AgentKind, Steps, Task
from tasks.agents.prompts import fill
from tasks.agents.tir import reason


def steps(task: Task) -> Steps:
    """Reason with the tools that the policy knows."""
    return (yield from reason(task, fill(task.prompts["bare"], question=shown_question(task))))


AGENT = AgentKind(steps, {"bare": frozenset({"question"}), **pages.PAGE}, in_worlds=True)

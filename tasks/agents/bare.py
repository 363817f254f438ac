"""bare: the recipe's own prompt, for a policy that was trained to call its tools in tags.

It is the question alone, after the recipe's system message. What training has reached, beside the
agents that a prompt makes of the same policy.
"""

from __future__ import annotations

from tasks.agents import pages
from tasks.agents.actions import shown_question
from tasks.agents.contract import AgentKind, Steps, Task, system, user
from tasks.agents.prompts import fill
from tasks.agents.tir import reason
from tasks.trees.dialogue import RESULT_TAGS


def steps(task: Task) -> Steps:
    """Reason with the tools that the policy knows; writing a result oneself ends it, as there."""
    prompt = fill(task.prompts["bare"], question=shown_question(task))
    messages = [*system(task.system), user(prompt)]
    return (yield from reason(task, messages, forged=RESULT_TAGS))


AGENT = AgentKind(
    steps,
    {"bare": frozenset({"question"}), **pages.PAGE},
    in_worlds=True,
    in_tags=True,
)

"""rag: search once for the question, read what is found, answer."""

from __future__ import annotations

from tasks.agents import pages
from tasks.agents.contract import AgentKind, Steps, Task, user
from tasks.agents.prompts import fill
from tasks.agents.tagged import ANSWER, answer_in, read


def steps(task: Task) -> Steps:
    """Retrieve once, then answer."""
    observation = yield from pages.look_up(task, task.question.text)
    prompt = fill(
        task.prompts["rag"], question=task.question.text, documents=task.shown(observation)
    )
    reply = yield task.request([user(prompt)])
    return answer_in(read(reply, [ANSWER]))


AGENT = AgentKind(
    steps, {"rag": frozenset({"question", "documents"}), **pages.PAGE}, needs_search=True
)

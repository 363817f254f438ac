"""direct: the model answers at once, without tools; in a world it acts without thoughts."""

from __future__ import annotations

from tasks.agents.actions import described, play, shown_question
from tasks.agents.contract import AgentKind, Steps, Task, user
from tasks.agents.prompts import fill
from tasks.agents.tagged import ANSWER, answer_in, read


def steps(task: Task) -> Steps:
    """Ask once; in a world, ask for one act after the other."""
    if task.first is not None:
        tools = described(task.specs)
        prompt = fill(task.prompts["act"], question=shown_question(task), tools=tools)
        return (yield from play(task, prompt, marked=False)).answer
    prompt = fill(task.prompts["direct"], question=task.question.text)
    reply = yield task.request([user(prompt)])
    return answer_in(read(reply, [ANSWER]))


AGENT = AgentKind(
    steps,
    {
        "direct": frozenset({"question"}),
        "act": frozenset({"question", "tools"}),
        "unread": frozenset(),
    },
    in_worlds=True,
)

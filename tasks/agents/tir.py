"""tir: tool-integrated reasoning by a prompt; calls stand in tags inside the reasoning.

The same form as the dialect of tags, so a policy that was trained in it can be asked the same way.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from tasks.agents import pages, tagged
from tasks.agents.actions import shown_question
from tasks.agents.contract import SPENT, AgentKind, Steps, Task, Wanted, assistant, user
from tasks.agents.prompts import fill
from tasks.dialects.tags import describe
from tasks.trees.tree import Call, Message


def steps(task: Task) -> Steps:
    """Reason with the tools that the prompt describes."""
    tools = describe(task.specs)
    prompt = fill(task.prompts["tir"], question=shown_question(task), tools=tools)
    return (yield from reason(task, [user(prompt)]))


def reason(
    task: Task, prompt: Sequence[Message], forged: Sequence[str] = ()
) -> Generator[Wanted, Any, str | None]:
    """Reason, with a result after each call, until an answer or the end of the world.

    ``forged``: what only tools write, at which a reply is stopped, and so ends.
    """
    names = [spec.name for spec in task.specs]
    tags = [*names, tagged.ANSWER]
    messages = [*prompt]
    for _ in range(task.limits.turns):
        reply = yield task.request(messages, (*tagged.closing(tags), *forged))
        step = tagged.read(reply, tags)
        if step.tag not in names or reply.finish == SPENT:
            return tagged.answer_in(step)
        observation = yield from pages.act(task, Call(step.tag, step.content))
        if observation.ends:
            return None
        messages += [assistant(step.text), tagged.result(task, observation)]
    return None


AGENT = AgentKind(
    steps,
    {"tir": frozenset({"question", "tools"}), **pages.PAGE},
    in_worlds=True,
)

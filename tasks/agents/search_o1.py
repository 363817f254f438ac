"""search_o1: search within the reasoning; documents are condensed before they go in.

Search-o1 (arXiv 2501.05366). Whatever a search finds is read apart, in a request of its own
(Reason-in-Documents); only what that request makes of it enters the reasoning.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from tasks.agents import pages, tagged
from tasks.agents.contract import (
    SPENT,
    AgentKind,
    CondenseRequest,
    Steps,
    Task,
    Wanted,
    assistant,
    user,
)
from tasks.agents.prompts import fill
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Message, Observation

SEARCH = "search"  # the tag, whatever the tool is called
TAGS = (SEARCH, tagged.ANSWER)


def steps(task: Task) -> Steps:
    """Reason, with condensed documents after each search, until an answer."""
    searches = str(task.limits.tool_calls)
    prompt = fill(task.prompts["search_o1"], question=task.question.text, searches=searches)
    messages: list[Message] = [user(prompt)]
    for _ in range(task.limits.turns):
        reply = yield task.request(messages, tagged.closing(TAGS))
        step = tagged.read(reply, TAGS)
        if step.tag != SEARCH or reply.finish == SPENT:
            return tagged.answer_in(step)
        observation = yield from pages.look_up(task, step.content)
        if observation.outcome == Outcome.OK:
            observation = yield from _condensed(
                task, [*messages[1:], assistant(step.text)], step, observation
            )
        messages += [assistant(step.text), tagged.result(task, observation)]
    return None


def _condensed(
    task: Task, reasoning: Sequence[Message], step: tagged.Tagged, observation: Observation
) -> Generator[Wanted, Any, Observation]:
    """Return what the documents say that helps the reasoning on."""
    prompt = fill(
        task.prompts["search_o1_condense"],
        question=task.question.text,
        reasoning="\n".join(message.content for message in reasoning),
        query=step.content,
        documents=observation.text,
    )
    reply = yield CondenseRequest(task.request([user(prompt)]))
    return Observation(observation.outcome, reply.text.strip())


AGENT = AgentKind(
    steps,
    {
        "search_o1": frozenset({"question", "searches"}),
        "search_o1_condense": frozenset({"question", "reasoning", "query", "documents"}),
        **pages.PAGE,
    },
    needs_search=True,
)

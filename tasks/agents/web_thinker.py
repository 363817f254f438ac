"""web_thinker: reason, send an explorer into the web, keep notes, answer (arXiv 2504.21776).

As in WebThinker, the reasoning asks for a search in its own words, and a second loop, the explorer,
searches, opens pages and returns its findings; what it read on the way stays with it. Its writing
of reports is left out, since the answers here are short: notes take their place, from which the
answer is written where the turns run out.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from tasks.agents import pages, tagged
from tasks.agents.contract import BROWSER, SPENT, AgentKind, Steps, Task, Wanted, assistant, user
from tasks.agents.prompts import fill
from tasks.dialects.tags import describe
from tasks.trees.tree import Call, Message

SEARCH, NOTE, FINDINGS = "search", "note", "findings"
NOTHING = "nothing was found"  # of an explorer that has written no findings
EXPLORING = 4  # replies of the explorer to one request, at most
TAGS = (SEARCH, NOTE, tagged.ANSWER)


def steps(task: Task) -> Steps:
    """Reason, explore and note until an answer; where turns run out, answer from the notes."""
    prompt = fill(task.prompts["web_thinker"], question=task.question.text)
    messages: list[Message] = [user(prompt)]
    notes: list[str] = []
    for _ in range(task.limits.turns):
        reply = yield task.request(messages, tagged.closing(TAGS))
        step = tagged.read(reply, TAGS)
        if reply.finish == SPENT or step.tag in ("", tagged.ANSWER):
            return tagged.answer_in(step)
        if step.tag == NOTE:
            notes.append(step.content)
            answer = "noted"
        else:
            answer = yield from _explored(task, step.content)
        messages += [assistant(step.text), user(f"<result>\n{answer}\n</result>")]
    return (yield from _from_notes(task, notes))


def _explored(task: Task, query: str) -> Generator[Wanted, Any, str]:
    """Search, and open pages, for what the reasoning wants; return the explorer's findings."""
    assert task.search, "checked before the agent starts"
    specs = [spec for spec in task.specs if spec.name in (task.search.name, BROWSER)]
    observation = yield from pages.act(task, Call(task.search.name, query))
    prompt = fill(
        task.prompts["web_thinker_explore"],
        question=task.question.text,
        wanted=query,
        documents=task.shown(observation),
        tools=describe(specs),
    )
    tools = [spec.name for spec in specs]
    messages: list[Message] = [user(prompt)]
    step = tagged.Tagged("")
    for _ in range(EXPLORING):
        reply = yield task.request(messages, tagged.closing([*tools, FINDINGS]))
        step = tagged.read(reply, [*tools, FINDINGS])
        if step.tag not in tools:
            break
        seen = yield from pages.act(task, Call(step.tag, step.content))
        messages += [assistant(step.text), tagged.result(task, seen)]
    return step.content if step.tag == FINDINGS else NOTHING


def _from_notes(task: Task, notes: list[str]) -> Generator[Wanted, Any, str | None]:
    """Return the answer that is written from the notes alone; None without notes."""
    if not notes:
        return None
    listed = "\n".join(f"- {note}" for note in notes)
    prompt = fill(task.prompts["web_thinker_answer"], question=task.question.text, notes=listed)
    reply = yield task.request([user(prompt)])
    return tagged.answer_in(tagged.read(reply, [tagged.ANSWER]))


AGENT = AgentKind(
    steps,
    {
        "web_thinker": frozenset({"question"}),
        "web_thinker_explore": frozenset({"question", "wanted", "documents", "tools"}),
        "web_thinker_answer": frozenset({"question", "notes"}),
        **pages.PAGE,
    },
    needs_search=True,
)

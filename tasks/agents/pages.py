"""How documents and pages enter an agent's context: as snippets, in full, or condensed.

The ablation of ARPO's browser (arXiv 2507.19849): an agent reads the snippets of the search alone,
or pages in full, or what a model condenses of each page for the question that it was opened for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from tasks.agents.contract import BROWSER, CONDENSED, SNIPPETS, CondenseRequest, Task, Wanted, user
from tasks.agents.prompts import fill
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation, ToolSpec

PAGE = {"page": frozenset({"question", "page"})}  # the prompt of every agent that opens pages
OPENED = 2  # pages that are opened of one search, at most
URL = re.compile(r"https?://[^\s)\]>\"']+")

Observed = Generator[Wanted, Any, Observation]


def offered(specs: Sequence[ToolSpec], pages: str) -> list[ToolSpec]:
    """Return the tools that an agent is told of: no browser where it reads snippets alone."""
    return [spec for spec in specs if pages != SNIPPETS or spec.name != BROWSER]


def act(task: Task, call: Call) -> Observed:
    """Make a call of an agent; a page that it opens enters as ``task.pages`` says."""
    seen: Observation = yield call
    if call.tool != BROWSER or task.pages != CONDENSED or seen.outcome != Outcome.OK:
        return seen
    prompt = fill(task.prompts["page"], question=_question_of(call, task), page=seen.text)
    reply = yield CondenseRequest(task.request([user(prompt)]))
    return replace(seen, text=reply.text.strip())


def look_up(task: Task, query: str) -> Observed:
    """Search; open the first pages that are found, unless snippets suffice or there is no browser.

    Raises ValueError for an agent without a search.
    """
    if task.search is None:
        raise ValueError("the agent has no tool that searches")
    observation = yield from act(task, Call(task.search.name, query))
    if task.pages == SNIPPETS or not task.offers(BROWSER) or observation.outcome != Outcome.OK:
        return observation
    texts = [observation.text]
    for url in list(dict.fromkeys(URL.findall(observation.text)))[:OPENED]:
        argument = json.dumps({"url": url, "question": query}, ensure_ascii=False)
        page = yield from act(task, Call(BROWSER, argument))
        if page.outcome == Outcome.OK:
            texts.append(f"{url}\n{page.text}")
    return replace(observation, text="\n\n".join(texts))


def _question_of(call: Call, task: Task) -> str:
    """Return what a page was opened for: the call's question, else the task's."""
    try:
        return str(json.loads(call.argument)["question"])
    except (ValueError, RecursionError, LookupError, TypeError):
        return task.question.text

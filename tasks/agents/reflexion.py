"""reflexion: try, judge the trial, reflect on a failure in words, and try again (arXiv 2303.11366).

Only reflections pass from a trial to the next, not its transcript. A trial in a world is judged by
the world. An answer to a question is judged by the model itself, never by the gold answer, unless
the task has an oracle, which tables mark; a trial without an answer has failed either way.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from tasks.agents.actions import Trial
from tasks.agents.contract import AgentKind, NewTrial, Steps, Task, Wanted, user
from tasks.agents.prompts import fill
from tasks.agents.react import PROMPTS, trial
from tasks.rewards.scoring import episode_score
from tasks.trees.tree import Message

MEMORY = 3  # reflections that the next trial reads, at most (section 3: one to three)


def steps(task: Task) -> Steps:
    """Try up to ``task.trials`` times; return the last answer."""
    lessons: list[str] = []
    done = yield from trial(task)
    for _ in range(task.trials - 1):
        if (yield from _succeeded(task, done)):
            break
        first = yield NewTrial()
        lessons.append((yield from _reflection(task, done)))
        memory = fill(task.prompts["reflexion_memory"], lessons=_listed(lessons[-MEMORY:]))
        done = yield from trial(replace(task, first=first), [memory])
    return done.answer


def _succeeded(task: Task, done: Trial) -> Generator[Wanted, Any, bool]:
    """Return whether a trial need not be repeated."""
    if task.first is not None:
        return episode_score(done.seen) >= 1
    if done.answer is None:
        return False
    if task.oracle:
        return task.oracle(done.answer)
    prompt = fill(
        task.prompts["reflexion_judge"],
        question=task.question.text,
        transcript=written(done.transcript),
        answer=done.answer,
    )
    reply = yield task.request([user(prompt)])
    return bool(reply.text.strip().lower().startswith("yes"))


def _reflection(task: Task, done: Trial) -> Generator[Wanted, Any, str]:
    """Return what the model says went wrong, and what to do instead."""
    prompt = fill(
        task.prompts["reflexion_reflect"],
        question=task.question.text,
        transcript=written(done.transcript),
    )
    reply = yield task.request([user(prompt)])
    return str(reply.text.strip())


def written(transcript: Sequence[Message]) -> str:
    """Return a transcript as text."""
    return "\n".join(message.content.strip() for message in transcript)


def _listed(lessons: Sequence[str]) -> str:
    return "\n".join(f"- {lesson}" for lesson in lessons)


AGENT = AgentKind(
    steps,
    {
        **PROMPTS,
        "reflexion_judge": frozenset({"question", "transcript", "answer"}),
        "reflexion_reflect": frozenset({"question", "transcript"}),
        "reflexion_memory": frozenset({"lessons"}),
    },
    in_worlds=True,
    retries=True,
)

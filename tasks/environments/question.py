"""The environment of a single question: it has no state, and answers each call with its tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasks.tools import Tool
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation


def respond(tools: Mapping[str, Tool], calls: Sequence[Call]) -> list[Observation]:
    """Run one round's calls, all calls of a tool side by side; observations in call order.

    What a tool answers follows from the argument, since no call sees another (a sandbox starts each
    from the same memory and random state): a group often asks the same, which is then run once.
    A call of a tool that is not at hand is answered by an observation that says so.
    """
    observations: dict[int, Observation] = {}
    for name in dict.fromkeys(call.tool for call in calls):
        mine = [i for i, call in enumerate(calls) if call.tool == name]
        run = tools.get(name) or _missing(name)
        different = list(dict.fromkeys(calls[i].argument for i in mine))
        answers = dict(zip(different, run(different), strict=True))
        observations.update((i, answers[calls[i].argument]) for i in mine)
    return [observations[i] for i in range(len(calls))]


def _missing(name: str) -> Tool:
    return lambda arguments: [Observation(Outcome.NO_SUCH_TOOL, f"no tool {name}")] * len(arguments)

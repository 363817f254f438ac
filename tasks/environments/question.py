"""The environment of a single question: no state; each call is answered by its tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasks.tools import Tool
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation


def respond(tools: Mapping[str, Tool], calls: Sequence[Call]) -> list[Observation]:
    """Answer the calls of one round; return their observations in call order.

    Each tool gets all its calls at once. A tool's observation depends on the argument alone, since
    no call sees another one (a sandbox starts each from the same memory and random state), so equal
    arguments, which are frequent in a group, run once. A call of an unknown tool gives an
    observation with the outcome NO_SUCH_TOOL.
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

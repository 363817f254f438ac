"""The environment of a single question: no state; each call is answered by its tool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from tasks.tools.contract import OpenTool
from tasks.tools.schema import with_values
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation, Question

Respond = Callable[[Sequence[Call]], list[Observation]]  # a round's calls -> their observations


class Questions:
    """Episodes of single questions, a ``Session`` of contract.py. No episode has a state."""

    def __init__(self, respond: Respond) -> None:
        self.respond = respond
        self.handles = count()

    def open(self, tasks: Sequence[Question]) -> list[tuple[int, Observation | None]]:
        """Return a handle for each question; there is nothing to see but the question."""
        return [(next(self.handles), None) for _ in tasks]

    def fork(self, handle: int, acts: int) -> int:
        """Return a new handle."""
        return next(self.handles)

    def act(self, moves: Sequence[tuple[int, Call]]) -> list[Observation]:
        """Answer all calls of the round together."""
        return self.respond([call for _, call in moves])

    def end(self, endings: Sequence[tuple[int, str]]) -> list[Observation | None]:
        """Return None for each: answers are scored later."""
        return [None] * len(endings)

    def solve(self, handles: Sequence[int]) -> list[Call | None]:
        """Return None for each: a question has no expert of its own."""
        return [None] * len(handles)

    def close(self, handle: int) -> None:
        """Release nothing."""


def answer(tools: Sequence[OpenTool], calls: Sequence[Call]) -> list[Observation]:
    """Answer the calls of one round; return their observations in call order.

    Each tool gets all its calls at once. A tool's observation depends on the argument alone, since
    no call sees another one (a sandbox starts each from the same memory and random state), so equal
    arguments, which are frequent in a group, run once. A call of an unknown tool gives an
    observation with the outcome NO_SUCH_TOOL; arguments that do not fit, BAD_ARGUMENTS.
    """
    offered = {spec.name: (spec, tool) for tool in tools for spec in tool.specs}
    observations: dict[Call, Observation] = {}
    waiting: dict[int, tuple[OpenTool, list[Call]]] = {}
    for call in dict.fromkeys(calls):
        if call.tool not in offered:
            observations[call] = Observation(Outcome.NO_SUCH_TOOL, f"no tool {call.tool}")
            continue
        spec, tool = offered[call.tool]
        checked = with_values(call, spec)
        if isinstance(checked, Observation):
            observations[call] = checked
        else:
            waiting.setdefault(id(tool), (tool, []))[1].append(checked)
    for tool, different in waiting.values():
        observations.update(zip(different, tool.run(different), strict=True))
    return [observations[call] for call in calls]

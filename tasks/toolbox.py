"""The tools of a recipe, opened together: what the calls of a round are answered by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from params.schema import Recipe
from tasks.environments.question import respond
from tasks.tools.python import python_tool
from tasks.trajectory import Call, Observation

Respond = Callable[[Sequence[Call]], list[Observation]]

TOOLS: dict[str, Callable[[Recipe], Any]] = {
    "python": lambda recipe: python_tool(recipe.python, recipe.machine.threads),
}


@contextmanager
def open_tools(recipe: Recipe) -> Iterator[Respond]:
    """The recipe's tools, warm until the end of the ``with``; what they answer to a round's calls.

    Raises RuntimeError where the sandbox that the recipe asks for does not work.
    """
    with ExitStack() as stack:
        tools: dict[str, Any] = {
            name: stack.enter_context(TOOLS[name](recipe)) for name in recipe.dialogue.tools
        }
        yield partial(respond, tools)

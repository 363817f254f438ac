"""The tools of a recipe, opened together: what the calls of a round are answered by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

from params.schema.recipe import Recipe
from tasks.environments.question import Tool, respond
from tasks.tools.python import python_tool
from tasks.tools.search import search_tool
from tasks.trees.tree import Call, Observation

Respond = Callable[[Sequence[Call]], list[Observation]]


def _python(recipe: Recipe, corpus: Path) -> AbstractContextManager[Tool]:
    return python_tool(recipe.python, recipe.machine.threads)


def _search(recipe: Recipe, corpus: Path) -> AbstractContextManager[Tool]:
    assert recipe.search is not None  # the schema's word where dialogue.tools has search
    return search_tool(recipe.search, corpus)


TOOLS: dict[str, Callable[[Recipe, Path], AbstractContextManager[Tool]]] = {
    "python": _python,
    "search": _search,
}


@contextmanager
def open_tools(recipe: Recipe, corpus: Path) -> Iterator[Respond]:
    """The recipe's tools, warm until the end of the ``with``; what they answer to a round's calls.

    ``corpus`` is the folder that search looks in; a recipe without search does not touch it.
    Raises RuntimeError where the sandbox that the recipe asks for does not work, ValueError for a
    corpus that is missing or empty.
    """
    with ExitStack() as stack:
        tools: dict[str, Tool] = {
            name: stack.enter_context(TOOLS[name](recipe, corpus)) for name in recipe.dialogue.tools
        }
        yield partial(respond, tools)

"""The tools that an agent can call: one file per tool, and one row of TOOLS."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from params.schema.base import Frozen
from tasks.tools.python import PythonTool, python_tool
from tasks.tools.search import Search, corpus_faults, search_tool
from tasks.trees.tree import Observation

Tool = Callable[[Sequence[str]], list[Observation]]  # arguments of a round -> observations


@dataclass(frozen=True)
class ToolKind:
    """A kind of tool: its settings in a recipe, how to open it, and how to check the settings.

    ``open(settings, corpus, workers)`` keeps the tool ready during a block. ``corpus`` is the
    recipe's folder of documents, ``workers`` the number of calls that may run in parallel.
    ``faults(settings, source)`` returns one line for each setting that does not fit questions from
    that source.
    """

    settings: type[Frozen]
    open: Callable[[Any, Path, int], AbstractContextManager[Tool]]
    faults: Callable[[Any, str], list[str]] = lambda settings, source: []


TOOLS = {
    "python": ToolKind(
        PythonTool, lambda settings, corpus, workers: python_tool(settings, workers)
    ),
    "search": ToolKind(
        Search, lambda settings, corpus, workers: search_tool(settings, corpus), corpus_faults
    ),
}

"""What an agent can call: one file a tool, and a row here."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from params.schema.base import Frozen
from tasks.tools.python import PythonTool, python_tool
from tasks.tools.search import Search, corpus_faults, search_tool
from tasks.trees.tree import Observation

Tool = Callable[[Sequence[str]], list[Observation]]  # arguments of a round -> what they gave back


@dataclass(frozen=True)
class ToolKind:
    """One kind of tool: the section of a recipe that sets it up, and how it is opened.

    ``open(settings, corpus, workers)`` keeps the tool warm for the time of a block. ``corpus`` is
    the recipe's folder of documents, ``workers`` how many calls may run side by side.
    ``faults(settings, source)`` returns what does not fit questions from that source, a line each.
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

"""The contract of a tool: a file of this room, or of the user's folder ``own/``, holds a ToolKind.

A recipe names tools in its section ``tools``: the name of a file here (``python``), or the path of
a user's file with the name of what it holds (``own/weather.py:weather``). A user's file imports
what it needs from ``beamline.tools``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from params.schema.base import Frozen
from tasks.trees.tree import Call, Observation, ToolSpec


@dataclass(frozen=True)
class Opening:
    """What a tool may use when it is opened."""

    corpus: Path  # the recipe's folder of documents
    workers: int  # calls that may run side by side


@dataclass(frozen=True)
class OpenTool:
    """A tool that is ready: what the agent is told about it, and how calls are run.

    One kind may offer several tools (an MCP server does). ``run`` takes the calls of a round and
    returns their observations in order. It never raises because of what an agent wrote: that gives
    an observation whose outcome names the fault.
    """

    specs: Sequence[ToolSpec]
    run: Callable[[Sequence[Call]], list[Observation]]


@dataclass(frozen=True)
class ToolKind:
    """A kind of tool: its settings in a recipe, how to open it, and how to check the settings.

    ``open(settings, opening)`` keeps the tool ready during a block. ``faults(settings, source)``
    returns one line for each setting that does not fit questions from that source, or that cannot
    work on this machine; it starts nothing. The results of a tool that is not ``repeatable`` depend
    on more than the call and the settings (the web, a clock), so they are recorded with the trees.
    """

    settings: type[Frozen]
    open: Callable[[Any, Opening], AbstractContextManager[OpenTool]]
    faults: Callable[[Any, str], list[str]] = lambda settings, source: []
    repeatable: bool = True
    # the names that the agent calls it by, as far as the settings tell; None: that of its file
    names: Callable[[Any], Sequence[str]] | None = None


def text_tool(spec: ToolSpec, run: Callable[[Sequence[str]], list[Observation]]) -> OpenTool:
    """Return a tool whose only parameter is a text, from a function of the texts of a round."""
    return OpenTool([spec], lambda calls: run([call.argument for call in calls]))


def text_spec(name: str, description: str, parameter: str, meaning: str) -> ToolSpec:
    """Return what an agent is told about a tool whose only parameter is a text."""
    properties = {parameter: {"type": "string", "description": meaning}}
    schema = {"type": "object", "properties": properties, "required": [parameter]}
    return ToolSpec(name, description, schema)

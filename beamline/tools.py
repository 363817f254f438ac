"""What a tool of your own may import (docs/own-tool.md)."""

from params.schema.base import Frozen
from tasks.tools.contract import Opening, OpenTool, ToolKind, text_spec, text_tool
from tasks.trees.outcomes import Outcome, UnavailableError
from tasks.trees.tree import Call, Observation, ToolSpec

__all__ = [
    "Call",
    "Frozen",
    "Observation",
    "OpenTool",
    "Opening",
    "Outcome",
    "ToolKind",
    "ToolSpec",
    "UnavailableError",
    "text_spec",
    "text_tool",
]

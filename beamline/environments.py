"""What an environment of your own may import (docs/own-environment.md)."""

from params.schema.base import Frozen
from tasks.trees.outcomes import Outcome, UnavailableError
from tasks.trees.tree import Call, Message, Observation, Question, ToolSpec

__all__ = [
    "Call",
    "Frozen",
    "Message",
    "Observation",
    "Outcome",
    "Question",
    "ToolSpec",
    "UnavailableError",
]

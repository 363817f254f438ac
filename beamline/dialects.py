"""What a dialect of your own may import (docs/own-dialect.md)."""

from params.schema.agent import Dialogue
from params.schema.base import Frozen
from tasks.dialects.contract import Dialect, DialectKind, Exchange, Tokens, Turn
from tasks.dialects.tags import TagsDialect
from tasks.dialects.written_turns import in_tags
from tasks.trees.clock import template_clock
from tasks.trees.markers import encode, markers, quote
from tasks.trees.outcomes import Outcome, StopReason
from tasks.trees.tree import Call, Message, Observation, Question, ToolSpec

__all__ = [
    "Call",
    "Dialect",
    "DialectKind",
    "Dialogue",
    "Exchange",
    "Frozen",
    "Message",
    "Observation",
    "Outcome",
    "Question",
    "StopReason",
    "TagsDialect",
    "Tokens",
    "ToolSpec",
    "Turn",
    "encode",
    "in_tags",
    "markers",
    "quote",
    "template_clock",
]

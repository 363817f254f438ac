"""Dialects: how turns, calls and observations are written as tokens (contract.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from params.schema.agent import Dialogue
from params.schema.base import Frozen
from tasks.dialects.contract import Dialect, DialectKind
from tasks.extensions import named
from tasks.trees.tree import ToolSpec


def dialect_kind(dialect: Mapping[str, Frozen]) -> DialectKind:
    """Return the kind of the only dialect in a recipe's section (name -> settings)."""
    (name,) = dialect
    return cast(DialectKind, named.find("dialect", name).held)


def open_dialect(
    dialect: Mapping[str, Frozen], tokenizer: Any, dialogue: Dialogue, specs: Sequence[ToolSpec]
) -> Dialect:
    """Open the dialect of a recipe's section for a tokenizer and these tools."""
    (settings,) = dialect.values()
    return dialect_kind(dialect).open(settings, tokenizer, dialogue, specs)

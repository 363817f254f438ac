"""Open a recipe's dialect as a chat format, for agents that send whole conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from params.schema.agent import Dialogue
from params.schema.base import Frozen
from tasks.dialects import open_dialect
from tasks.dialects.chat_format import ChatFormat
from tasks.dialects.native import NativeDialect
from tasks.dialects.native_chat import NativeChat
from tasks.dialects.tags import TagsDialect
from tasks.dialects.tags_chat import TagsChat
from tasks.trees.tree import ToolSpec

FORMATS: dict[type[Any], Callable[[Any], ChatFormat]] = {
    NativeDialect: NativeChat,
    TagsDialect: TagsChat,
}


def open_chat(
    dialect: Mapping[str, Frozen], tokenizer: Any, dialogue: Dialogue, specs: Sequence[ToolSpec]
) -> ChatFormat:
    """Open the dialect of a recipe's section as a chat format, for a tokenizer and these tools.

    A user's own dialect is one itself, where it has the methods of ``ChatFormat``. Raises
    ValueError for one that has not, and as ``open_dialect``.
    """
    opened: Any = open_dialect(dialect, tokenizer, dialogue, specs)
    made = FORMATS.get(type(opened))
    if made:
        return made(opened)
    if missing := [name for name in ("extend", "reply") if not hasattr(opened, name)]:
        raise ValueError(
            f"dialect {next(iter(dialect))} has no method {' and '.join(missing)}, by which the "
            "conversations of a program are written and read (tasks/dialects/chat_format.py): add "
            f"them to {type(opened).__name__}, or choose tags or native"
        )
    chat: ChatFormat = opened
    return chat

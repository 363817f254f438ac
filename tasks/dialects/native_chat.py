"""The native dialect as a chat format: conversations in the format of a model's own family."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tasks.dialects.chat_format import (
    ChatMessage,
    Show,
    ToolCall,
    TurnReply,
    check_system,
    split_system,
    unchanged,
)
from tasks.dialects.contract import Tokens, numbered
from tasks.dialects.json_values import object_of, quoted
from tasks.dialects.native import NativeDialect
from tasks.trees import dialogue as talk
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call


class NativeChat:
    """See ``tasks.dialects.chat_format.ChatFormat``."""

    def __init__(self, dialect: NativeDialect) -> None:
        self.dialect = dialect
        self.stop_strings = dialect.stop_strings

    def prompt(self, messages: Sequence[ChatMessage]) -> Tokens:
        dialect = self.dialect
        first, others = split_system(messages)
        told = [*([dialect.dialogue.system] if dialect.dialogue.system else []), *first]
        system = [ChatMessage("system", "\n\n".join(told))] if told else []
        try:
            tokens = unchanged(
                lambda show: dialect._rendered(
                    [self._written(each, show) for each in (*system, *others)], dialect.tools
                ),
                dialect.tokenizer,
                dialect.marks,
            )
            check_system(others, lambda: dialect.tokenizer.decode(tokens))
            return tokens
        except Exception as error:  # a chat template raises what it likes
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def extend(
        self, prompt: Tokens, turn: Tokens, messages: Sequence[ChatMessage]
    ) -> Tokens | None:
        dialect, before = self.dialect, [*prompt.tolist(), *turn.tolist()]

        def written(show: Show) -> list[int]:
            following = [self._written(each, show) for each in messages]
            bridge = dialect.renderer.bridge_to_next_turn(
                prompt.tolist(), turn.tolist(), following, tools=dialect.tools
            )
            if bridge is None or bridge.token_ids[: len(before)] != before:
                raise _NoBridgeError
            return list(bridge.token_ids[len(before) :])

        try:
            return unchanged(written, dialect.tokenizer, dialect.marks)
        except _NoBridgeError:
            return None

    def reply(self, prompt: Tokens, turn: Tokens, text: str, stopped: str, calls: int) -> TurnReply:
        dialect = self.dialect
        read = dialect.read(prompt, turn, text, stopped)
        said = talk.readable(dialect._without_end(turn, text))
        # A client that has offered no such tool would get neither a text nor a call that it knows.
        if not dialect.free and any(call.tool not in dialect.specs for call in read.calls):
            return TurnReply(ChatMessage("assistant", said), Outcome.BAD_CALL)
        if read.outcome not in (Outcome.CALL, Outcome.ANSWER, Outcome.NO_ANSWER):
            return TurnReply(ChatMessage("assistant", said), read.outcome)
        parsed = dialect._parsed(turn.tolist(), prompt.tolist())
        thoughts = talk.readable(parsed.reasoning_content or "") if parsed else ""
        made = tuple(self._call(each) for each in numbered(dialect, read.calls, calls))
        free = dialect.free and read.calls
        content = read.calls[0].argument if free else read.said
        message = ChatMessage("assistant", content, () if free else made, thoughts=thoughts)
        return TurnReply(message, read.outcome)

    def _call(self, call: Call) -> ToolCall:
        spec = self.dialect.specs.get(call.tool)
        parameter = spec.text_parameter if spec else None
        whole = not parameter or call.values  # the values say what does not fit the tool
        arguments = call.argument if whole else json.dumps({parameter: call.argument})
        return ToolCall(call.id, call.tool, arguments)

    def _written(self, message: ChatMessage, show: Show) -> dict[str, Any]:
        """Return a message as the library takes it."""
        if message.role == "tool":
            return {
                "role": "tool",
                "name": show(message.name),
                "tool_call_id": show(message.call_id),
                "content": show(message.content),
            }
        content, thoughts = message.content, message.thoughts
        if not self.dialect.thinks:
            content, thoughts = "\n\n".join(filter(None, [thoughts, content])), ""
        written: dict[str, Any] = {"role": message.role, "content": show(content)}
        if thoughts:
            written["reasoning_content"] = show(thoughts)
        if message.calls:
            written["tool_calls"] = [_tool_call(call, show) for call in message.calls]
        return written


class _NoBridgeError(Exception):
    """The library cannot go on from a turn."""


def _tool_call(call: ToolCall, show: Show) -> dict[str, Any]:
    arguments = quoted(object_of(call.arguments) or {}, show)
    function = {"name": show(call.name), "arguments": arguments}
    return {"id": show(call.id), "type": "function", "function": function}

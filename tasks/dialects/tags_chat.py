"""The dialect of tags as a chat format: calls and results stand in one message of the assistant."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import Any

import numpy as np

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
from tasks.dialects.json_values import object_of
from tasks.dialects.tags import TagsDialect
from tasks.dialects.written_turns import THOUGHT, in_tags
from tasks.trees import dialogue as talk
from tasks.trees.markers import encode, markers
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation

SAID = "The words of the assistant."  # stands for a turn where what follows it is rendered
WHOLE = 10**9  # tokens of a result, at most: the program decides what its agent reads
AGENT = ("assistant", "tool")  # roles whose messages are one message of the template


class TagsChat:
    """See ``tasks.dialects.chat_format.ChatFormat``."""

    def __init__(self, dialect: TagsDialect) -> None:
        self.dialect = dialect
        self.stop_strings = dialect.stop_strings
        self.marks = markers(dialect.tokenizer, talk.tags(dialect.tools))

    def prompt(self, messages: Sequence[ChatMessage]) -> Tokens:
        first, others = split_system(messages)

        def write(show: Show) -> list[int]:
            *before, last = [*self._system(first, show), *self._in_one(others, show)]
            begun = last[1] if last[0] == "assistant" else ""
            rendered = before if begun else [*before, last]
            return [*self._rendered(rendered), *encode(self.dialect.tokenizer, begun)]

        try:
            tokens = unchanged(write, self.dialect.tokenizer, self.marks)
            check_system(others, lambda: self.dialect.tokenizer.decode(tokens))
            return tokens
        except Exception as error:  # a chat template raises what it likes
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def extend(
        self, prompt: Tokens, turn: Tokens, messages: Sequence[ChatMessage]
    ) -> Tokens | None:
        tokenizer = self.dialect.tokenizer
        results = list(takewhile(lambda message: message.role == "tool", messages))
        others = messages[len(results) :]
        pieces = [self._result(message.content) for message in results]
        if others:
            ended = not results and len(turn) > 0 and turn[-1] == tokenizer.eos_token_id
            following = self._following(others, ended)
            if following is None:
                return None
            pieces.append(following)
        return np.concatenate([np.zeros(0, np.int32), *pieces])

    def reply(self, prompt: Tokens, turn: Tokens, text: str, stopped: str, calls: int) -> TurnReply:
        read = self.dialect.read(prompt, turn, text, stopped)
        offered = {spec.name for spec in self.dialect.specs}
        called = [*read.calls, *talk.read_calls(THOUGHT.sub("", text), self.dialect.tools)]
        if any(call.tool not in offered for call in called):  # a client would not know of it
            return TurnReply(ChatMessage("assistant", talk.readable(text)), Outcome.BAD_CALL)
        if read.outcome not in (Outcome.CALL, Outcome.ANSWER, Outcome.NO_ANSWER):
            return TurnReply(ChatMessage("assistant", talk.readable(text)), read.outcome)
        thoughts, _, said = in_tags(talk.readable(text), self.dialect.tools)
        made = tuple(self._call(each) for each in numbered(self.dialect, read.calls, calls))
        return TurnReply(ChatMessage("assistant", said, made, thoughts=thoughts), read.outcome)

    def _call(self, call: Call) -> ToolCall:
        parameter = self._parameter(call.tool)
        if parameter:
            return ToolCall(call.id, call.tool, json.dumps({parameter: call.argument}))
        return ToolCall(call.id, call.tool, talk.readable(call.argument))

    def _parameter(self, tool: str) -> str | None:
        """Return the only parameter of a tool, where that is a text."""
        return next((s.text_parameter for s in self.dialect.specs if s.name == tool), None)

    def _result(self, text: str) -> Tokens:
        observation = Observation(Outcome.OK, text)
        return talk.result_tokens(self.dialect.tokenizer, observation, WHOLE, self.dialect.tools)[1]

    def _following(self, messages: Sequence[ChatMessage], ended: bool) -> Tokens | None:
        """Return what the template writes after a message of the assistant.

        ``ended``: whether that has its end token already.
        """
        end = self.dialect.tokenizer.eos_token or ""

        def write(show: Show) -> list[int]:
            pairs = [("user", "a"), ("assistant", SAID), *self._in_one(messages, show)]
            parts = self._applied(pairs).split(SAID)
            if len(parts) != 2:
                raise ValueError("the chat template changes what an assistant has said")
            rest = parts[1].removeprefix(end) if ended else parts[1]
            return list(encode(self.dialect.tokenizer, rest))

        try:
            tokens = unchanged(write, self.dialect.tokenizer, self.marks)
            check_system(messages, lambda: self.dialect.tokenizer.decode(tokens))
            return tokens
        except Exception:  # a chat template raises what it likes: then a new prompt is written
            return None

    def _rendered(self, pairs: Sequence[tuple[str, str]]) -> list[int]:
        text = talk.OPENED_THOUGHT.sub("", self._applied(pairs))
        return list(encode(self.dialect.tokenizer, text))

    def _applied(self, pairs: Sequence[tuple[str, str]]) -> str:
        said = [{"role": role, "content": content} for role, content in pairs]
        return talk.applied(self.dialect.tokenizer, said, self.dialect.dialogue.date)

    def _system(self, contents: Sequence[str], show: Show) -> list[tuple[str, str]]:
        """Return the recipe's own system message and the first ones of a conversation as one."""
        own = [self.dialect.dialogue.system] if self.dialect.dialogue.system else []
        told = [*own, *map(show, contents)]
        return [("system", "\n\n".join(told))] if told else []

    def _in_one(self, messages: Sequence[ChatMessage], show: Show) -> list[tuple[str, str]]:
        """Return role and content of each message, with all turns and results between in one."""
        pairs: list[tuple[str, str]] = []
        for agent, some in groupby(messages, lambda message: message.role in AGENT):
            if agent:
                pairs.append(("assistant", "".join(self._text(each, show) for each in some)))
            else:
                pairs += [(each.role, show(each.content)) for each in some]
        return pairs

    def _text(self, message: ChatMessage, show: Show) -> str:
        opening, closing = talk.RESULT_TAGS
        if message.role == "tool":
            return f"{opening}{show(message.content.strip())}{closing}"
        thoughts = f"<think>{show(message.thoughts)}</think>" if message.thoughts else ""
        calls = [f"<{call.name}>{show(self._inside(call))}</{call.name}>" for call in message.calls]
        return "".join([thoughts, show(message.content), *calls])

    def _inside(self, call: ToolCall) -> str:
        """Return what stands between the tags of a call."""
        parameter = self._parameter(call.name)
        values: Any = object_of(call.arguments)
        text = values.get(parameter) if values and parameter else None
        return text if isinstance(text, str) else call.arguments

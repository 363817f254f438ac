"""Calls in the plain text of messages, for a chat template that has none of its own.

Many chat templates write a message's content and nothing else (SmolLM2, Gemma 3): calls, results
and the tools themselves would be lost. ``AROUND`` is put before such a template. It turns them into
contents in the form of Hermes, which many models were trained on and servers read (vLLM's parser
``hermes``): the system message describes the tools, or else the first one of the user; an agent
writes a JSON object with ``name`` and ``arguments`` in ``<tool_call>``; results are messages of the
user, in ``<tool_response>``. A tokenizer without tokens for these marks writes them as text, and
``TextCalls`` reads them there.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

TEXT_CALLS = "hermes"  # its name among the parsers of the library ``renderers``
OPEN, CLOSE = "<tool_call>", "</tool_call>"
BLOCK = re.compile(f"{OPEN}(.*?)({CLOSE}|$)", re.DOTALL)
AROUND = """\
{%- set plain = namespace(messages=[], results="", tools="", teller="TELLER") -%}
{%- if tools -%}
{%- set plain.tools = "You can call these tools:" -%}
{%- for tool in tools -%}
{%- set plain.tools = plain.tools + "\\n" + ((tool.function or tool) | tojson) -%}
{%- endfor -%}
{%- set told = "\\nTo call one, write " -%}
{%- set form = '<tool_call>{"name": its name, "arguments": {its arguments}}</tool_call>' -%}
{%- set plain.tools = plain.tools + told + form + " and wait for its result." -%}
{%- if plain.teller == "system" and messages[0].role != "system" -%}
{%- set plain.messages = [{"role": "system", "content": plain.tools}] -%}
{%- set plain.tools = "" -%}
{%- endif -%}
{%- endif -%}
{%- for message in messages -%}
{%- set words = message.content or "" -%}
{%- if message.role == "tool" -%}
{%- set plain.results = plain.results + "<tool_response>" + words + "</tool_response>" -%}
{%- if loop.last or messages[loop.index].role != "tool" -%}
{%- set plain.messages = plain.messages + [{"role": "user", "content": plain.results}] -%}
{%- set plain.results = "" -%}
{%- endif -%}
{%- elif message.role == plain.teller and plain.tools -%}
{%- set both = words + ("\\n\\n" if words else "") + plain.tools -%}
{%- set plain.messages = plain.messages + [{"role": message.role, "content": both}] -%}
{%- set plain.tools = "" -%}
{%- elif message.tool_calls -%}
{%- set calls = namespace(text=words) -%}
{%- set ended = not words or words[-1] in " \\n" -%}
{%- for call in message.tool_calls -%}
{%- set made = call.function or call -%}
{%- set written = made.arguments if made.arguments is string else made.arguments | tojson -%}
{%- set body = '{"name": ' + (made.name | tojson) + ', "arguments": ' + written + '}' -%}
{%- set between = "" if loop.first and ended else "\\n" -%}
{%- set calls.text = calls.text + between + "<tool_call>" + body + "</tool_call>" -%}
{%- endfor -%}
{%- set plain.messages = plain.messages + [{"role": message.role, "content": calls.text}] -%}
{%- else -%}
{%- set plain.messages = plain.messages + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = plain.messages -%}
"""
TELLERS = ("system", "user")  # whose message describes the tools; some templates have no system
NAME, ARGUMENT, RESULT = "probe27182", "11213", "31415"  # of what probes a template
ASKED = {"role": "user", "content": "a"}
MADE = {"function": {"name": NAME, "arguments": {"text": ARGUMENT}}}
CALLED = [
    ASKED,
    {"role": "assistant", "content": "", "tool_calls": [MADE]},
    {"role": "tool", "name": NAME, "content": RESULT},
]
TOOL = {"function": {"name": NAME, "description": "", "parameters": {"type": "object"}}}


def with_calls(tokenizer: Any) -> Any:
    """Return the tokenizer; where its chat template has no calls, a copy with ``AROUND`` before it.

    A template that describes tools, or refuses what ``AROUND`` makes of a call, stays as it is.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str) or _says(tokenizer, [ASKED], NAME, [TOOL]):
        return tokenizer
    if _says(tokenizer, CALLED, ARGUMENT):
        return tokenizer
    for teller in TELLERS:
        plain = copy.copy(tokenizer)
        plain.chat_template = AROUND.replace("TELLER", teller) + template
        if _says(plain, CALLED, NAME, [TOOL]) and _says(plain, CALLED, RESULT):
            return plain
    return tokenizer


def _says(
    tokenizer: Any, messages: Sequence[Any], text: str, tools: Sequence[Any] | None = None
) -> bool:
    """Return whether the chat template writes a text for these messages."""
    with suppress(Exception):  # of a template: any kind
        return text in tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    return False


class TextCalls:
    """Reads calls in the form of Hermes as text: a parser of the library ``renderers``."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def extract(self, ids: Sequence[int]) -> tuple[list[int], list[Any]]:
        """Return the tokens of what is said before the first call, and the calls."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        blocks = list(BLOCK.finditer(text))
        if not blocks:
            return list(ids), []
        said = self.tokenizer.encode(text[: blocks[0].start()], add_special_tokens=False)
        return list(said), [_call(block) for block in blocks]


def reads_text(renderer: Any) -> bool:
    """Return whether a renderer of the library reads calls in this way."""
    return isinstance(getattr(renderer, "_tool_parser", None), TextCalls)


def _call(block: re.Match[str]) -> Any:
    """Return a block of a call as the library has it, with what is wrong in it."""
    from renderers.base import ParsedToolCall, ToolCallParseStatus

    raw = block[1].strip()
    if not block[2]:
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.UNCLOSED_BLOCK)
    try:
        read = json.loads(raw)
    except (ValueError, RecursionError):
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.INVALID_JSON)
    fields = read if isinstance(read, dict) else {}
    if not isinstance(name := fields.get("name"), str) or not name:
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.MISSING_NAME)
    return ParsedToolCall(raw=raw, name=name, arguments=fields.get("arguments", {}))

"""Messages of OpenAI's protocol: read, compared, and written. Pure.

Clients do not send back what they got: a content is a text, a list of parts or missing, arguments
of calls are spaced otherwise, thoughts are dropped, calls have other ids. Two conversations are the
same where their canonical forms are equal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.dialects.chat_format import ChatMessage, ToolCall
from tasks.dialects.json_values import depth, object_of
from tasks.tools.own_tool import spec_faults
from tasks.trees.tree import ToolSpec

ROLES = {"developer": "system", "function": "tool"}  # other names that clients have for roles
KNOWN = ("system", "user", "assistant", "tool")
DEPTH = 32  # levels of the values of a call, at most

Canonical = tuple[Any, ...]  # of a message


class RefusedError(Exception):
    """A request cannot be answered; ``status`` and ``code`` are what the client is told."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


# ---------------------------------------------------------------- read


def messages_of(given: Any) -> tuple[ChatMessage, ...]:
    """Read the messages of a request. Raises RefusedError with the place of what is wrong."""
    if not isinstance(given, list) or not given:
        raise RefusedError("messages: write a list of messages")
    messages: list[ChatMessage] = []
    names: dict[str, str] = {}  # of the tools by the ids of calls
    for index, one in enumerate(given):
        message = _message(one, f"messages[{index}]", names)
        names |= {call.id: call.name for call in message.calls}
        messages.append(message)
    if messages[-1].role == "assistant":
        raise RefusedError("messages: the last one is the assistant's; there is nothing to answer")
    return tuple(_in_order_of_calls(messages))


def _in_order_of_calls(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return messages with the results after a turn in the order of the calls that they answer.

    An agent sends the results of parallel calls as they get ready, and a chat template writes them
    without ids. Raises RefusedError for a result of no call, a second one, and one that is missing
    where others are there. Calls without ids stay as they are.
    """
    ordered: list[ChatMessage] = []
    start = 0
    while start < len(messages):
        end = start + 1
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        turn, results = messages[start], messages[start + 1 : end]
        places = {call.id: place for place, call in enumerate(turn.calls)}
        if results and turn.calls and len(places) == len(turn.calls) and "" not in places:
            _check_results([*places], results, start + 1)
            results = sorted(results, key=lambda result: places[result.call_id])
        ordered += [turn, *results]
        start = end
    return ordered


def _check_results(calls: Sequence[str], results: Sequence[ChatMessage], first: int) -> None:
    """Raise RefusedError unless there is one result for each call; ``first``: their place."""
    for index, result in enumerate(results, first):
        if result.call_id not in calls:
            raise RefusedError(
                f"messages[{index}].tool_call_id is {result.call_id!r}: it names no call of the "
                f"turn before, which has {', '.join(calls)}"
            )
    answered = [result.call_id for result in results]
    if missing := [call for call in calls if call not in answered]:
        raise RefusedError(f"messages[{first}]: there is no result of the call {missing[0]}")
    if len(answered) > len(calls):
        raise RefusedError(f"messages[{first}]: a call has two results: {', '.join(answered)}")


def _message(given: Any, where: str, names: Mapping[str, str]) -> ChatMessage:
    if not isinstance(given, dict):
        raise RefusedError(f"{where}: write an object with role and content")
    role = given.get("role")
    role = ROLES.get(role, role) if isinstance(role, str) else role
    if given.get("function_call"):
        raise RefusedError(f"{where}.function_call: write tool_calls, and results with their ids")
    if role not in KNOWN:
        raise RefusedError(f"{where}.role is {role!r}: choose one of {', '.join(KNOWN)}")
    calls = _calls(given.get("tool_calls") or [], where) if role == "assistant" else ()
    thoughts = given.get("reasoning_content") or given.get("reasoning") or ""
    call_id = given.get("tool_call_id") or ""
    return ChatMessage(
        role,
        _text(given.get("content"), f"{where}.content"),
        calls,
        str(call_id),
        str(given.get("name") or names.get(str(call_id), "")) if role == "tool" else "",
        thoughts if role == "assistant" and isinstance(thoughts, str) else "",
    )


def _text(content: Any, where: str) -> str:
    """Return the text of a content: a text, a list of parts of text, or nothing."""
    if content is None:
        return ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise RefusedError(f"{where}: write a text")
    said = [each.get("text", each.get("refusal")) for each in parts if isinstance(each, dict)]
    texts = [text for text in said if isinstance(text, str)]
    if len(texts) < len(parts):
        raise RefusedError(f"{where}: only text is read, no images, sounds or files")
    return "".join(texts).encode(errors="replace").decode()


def _calls(given: Any, where: str) -> tuple[ToolCall, ...]:
    if not isinstance(given, list):
        raise RefusedError(f"{where}.tool_calls: write a list")
    calls = []
    for one in given:
        function = one.get("function") if isinstance(one, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RefusedError(f"{where}.tool_calls: each is a function with name and arguments")
        arguments = function.get("arguments") or "{}"
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        values = object_of(arguments)
        if values is not None and depth(values) > DEPTH:
            raise RefusedError(f"{where}.tool_calls: its arguments have over {DEPTH} levels")
        calls.append(ToolCall(str(one.get("id") or ""), function["name"], arguments))
    return tuple(calls)


def tools_of(given: Any) -> tuple[ToolSpec, ...]:
    """Read the tools of a request. Raises RefusedError for what is no function."""
    if given is None:
        return ()
    if not isinstance(given, list):
        raise RefusedError("tools: write a list of functions")
    specs = []
    for index, one in enumerate(given):
        function = one.get("function") if isinstance(one, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RefusedError(f"tools[{index}]: only functions with a name are offered")
        empty = {"type": "object", "properties": {}}
        parameters = function.get("parameters") or empty
        spec = ToolSpec(function["name"], str(function.get("description") or ""), parameters)
        if faults := _spec_faults(spec):
            raise RefusedError(f"tools[{index}]: {'; '.join(faults)}")
        specs.append(spec)
    if len({spec.name for spec in specs}) < len(specs):
        raise RefusedError("tools: two of them have the same name")
    return tuple(specs)


def _spec_faults(spec: ToolSpec) -> list[str]:
    if not isinstance(spec.parameters, dict):
        return ["parameters: write a JSON schema"]
    return spec_faults(spec)


# ---------------------------------------------------------------- compared


def canonical(messages: Sequence[ChatMessage]) -> list[Canonical]:
    """Return the canonical form of each message of a conversation.

    A result names its call by the call's place among those of the turn before, not by its id.
    """
    forms: list[Canonical] = []
    places: dict[str, int] = {}
    for message in messages:
        calls = tuple((call.name, _values(call.arguments)) for call in message.calls)
        if message.role == "assistant":
            places = {call.id: place for place, call in enumerate(message.calls)}
            forms.append(("assistant", message.content.strip(), calls))
        elif message.role == "tool":
            place = places.get(message.call_id, message.call_id)
            forms.append(("tool", message.content, place))
        else:
            forms.append((message.role, message.content))
    return forms


def _values(arguments: str) -> str:
    """Return the arguments of a call in one spelling."""
    values = object_of(arguments)
    return arguments.strip() if values is None else json.dumps(values, sort_keys=True)


def tool_form(tools: Sequence[ToolSpec]) -> str:
    """Return the tools of a request in one spelling."""
    return json.dumps(
        [[spec.name, spec.description, spec.parameters] for spec in tools], sort_keys=True
    )


def digest(*forms: Any) -> str:
    """Return a digest of canonical forms."""
    return hashlib.blake2b(repr(forms).encode(), digest_size=16).hexdigest()

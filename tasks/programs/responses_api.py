"""The newer form of OpenAI's protocol, ``/v1/responses``, as far as it says what a chat says. Pure.

Nothing is stored: a request that names an earlier response is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.programs import answering
from tasks.programs.episodes import SampledAnswer
from tasks.programs.messages import RefusedError

SAME = (
    "model temperature top_p stream tool_choice parallel_tool_calls store metadata user "
    "service_tier safety_identifier prompt_cache_key prompt_cache_retention reasoning include "
    "truncation"
).split()
READ = ("input", "instructions", "tools", "max_output_tokens", "text")


def as_chat(body: Any) -> dict[str, Any]:
    """Return a request of this form as a chat request. Raises RefusedError for what it is not."""
    if not isinstance(body, dict):
        raise RefusedError("the body is no JSON object")
    unknown = [
        key for key, value in body.items() if value is not None and key not in (*SAME, *READ)
    ]
    if unknown:
        raise RefusedError(f"{', '.join(sorted(unknown))}: this gateway does not know it")
    chat = {key: body[key] for key in SAME if body.get(key) is not None and key != "stream"}
    text = body.get("text") or {}
    if isinstance(text, Mapping) and text.get("format") not in (None, {"type": "text"}):
        chat["response_format"] = text["format"]
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if body.get("tools"):
        chat["tools"] = [_tool(each, index) for index, each in enumerate(body["tools"])]
    told = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    return {**chat, "messages": [*told, *_messages(body.get("input"))]}


def _tool(given: Any, index: int) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("type") != "function":
        raise RefusedError(f"tools[{index}]: only functions are offered")
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: given.get(name) for name in names}}


def _messages(given: Any) -> list[dict[str, Any]]:
    """Return the items of an input as messages; calls belong to the message before them."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        raise RefusedError("input: write a text or a list of items")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise RefusedError(f"input[{index}]: write an object")
        kind = item.get("type", "message")
        if kind == "message":
            content = _content(item.get("content"))
            messages.append({"role": item.get("role"), "content": content})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _content(item.get("output"))
            called = item.get("call_id")
            messages.append({"role": "tool", "tool_call_id": called, "content": output})
        elif kind != "reasoning":  # thoughts are not sent back to a policy
            raise RefusedError(f"input[{index}] is a {kind}: this gateway does not know it")
    return messages


def _content(given: Any) -> Any:
    """Return a content with parts as chats call them."""
    if not isinstance(given, list):
        return given
    texts = ("input_text", "output_text", "text")
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in texts
        else part
        for part in given
    ]


def response(answer: SampledAnswer, body: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return a whole response."""
    name = answering.identity([answer]).removeprefix("chatcmpl-")
    message, output = answer.reply.message, []
    if message.content or not message.calls:
        text = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        output.append(
            {
                "id": f"msg_{name}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [text],
            }
        )
    output += [
        {
            "id": f"fc_{name}_{number}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        for number, call in enumerate(message.calls)
    ]
    counted = answering.usage([answer])
    cut = answering.finish(answer) == "length"
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": 0,
        "model": model,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "top_p": None,
        "usage": {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": counted["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
        },
    }


def events(written: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a response as a stream of events."""
    begun = {**written, "status": "in_progress", "output": [], "usage": None}
    told: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(written["output"]):
        told += _item_events(index, item)
    end = "response.incomplete" if written["status"] == "incomplete" else "response.completed"
    told.append({"type": end, "response": dict(written)})
    return [{**event, "sequence_number": number} for number, event in enumerate(told)]


def _item_events(index: int, item: Mapping[str, Any]) -> list[dict[str, Any]]:
    at = {"output_index": index, "item_id": item["id"]}
    added = {"type": "response.output_item.added", "output_index": index}
    done = {"type": "response.output_item.done", "output_index": index, "item": dict(item)}
    if item["type"] == "function_call":
        name = "response.function_call_arguments"
        empty = {**item, "arguments": "", "status": "in_progress"}
        return [
            {**added, "item": empty},
            {"type": f"{name}.delta", **at, "delta": item["arguments"]},
            {"type": f"{name}.done", **at, "arguments": item["arguments"], "name": item["name"]},
            done,
        ]
    (part,) = item["content"]
    at = {**at, "content_index": 0}
    empty = {**item, "content": [], "status": "in_progress"}
    return [
        {**added, "item": empty},
        {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
        {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []},
        {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []},
        {"type": "response.content_part.done", **at, "part": part},
        done,
    ]

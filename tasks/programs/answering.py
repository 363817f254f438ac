"""Write sampled answers as OpenAI's protocol has them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.dialects.chat_format import ChatMessage
from tasks.programs.asking import Asked
from tasks.programs.episodes import SampledAnswer
from tasks.trees.outcomes import StopReason


def identity(answers: Sequence[SampledAnswer]) -> str:
    """Return the id of a completion, which is the same in each run."""
    return f"chatcmpl-{answers[0].key.replace('/', '-')}"


def completion(answers: Sequence[SampledAnswer], asked: Asked, model: str) -> dict[str, Any]:
    """Return a whole chat completion."""
    return {
        "id": identity(answers),
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [
            {
                "index": index,
                "message": message_of(answer.reply.message),
                "finish_reason": finish(answer),
                "logprobs": logprobs(answer) if asked.logprobs else None,
            }
            for index, answer in enumerate(answers)
        ],
        "usage": usage(answers),
    }


def chunks(answers: Sequence[SampledAnswer], asked: Asked, model: str) -> list[dict[str, Any]]:
    """Return the chunks of a streamed completion: role, content, calls, and why it ended."""
    head = {
        "id": identity(answers),
        "object": "chat.completion.chunk",
        "created": 0,
        "model": model,
    }
    pieces = []
    for index, answer in enumerate(answers):
        message = message_of(answer.reply.message)
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if thoughts := message.get("reasoning_content"):
            deltas.append({"reasoning_content": thoughts})
        if message["content"]:
            deltas.append({"content": message["content"]})
        for number, call in enumerate(message.get("tool_calls", ())):
            deltas.append({"tool_calls": [{"index": number, **call}]})
        told = logprobs(answer) if asked.logprobs else None
        for place, delta in enumerate(deltas):
            choice = {"index": index, "delta": delta, "finish_reason": None}
            pieces.append({**head, "choices": [{**choice, "logprobs": None if place else told}]})
        end = {"index": index, "delta": {}, "finish_reason": finish(answer), "logprobs": None}
        pieces.append({**head, "choices": [end]})
    if asked.stream_usage:
        pieces.append({**head, "choices": [], "usage": usage(answers)})
    return pieces


def message_of(message: ChatMessage) -> dict[str, Any]:
    """Return an answer as a message."""
    written: dict[str, Any] = {"role": "assistant", "content": message.content or None}
    if not message.calls:
        written["content"] = message.content
    if message.thoughts:
        written["reasoning_content"] = message.thoughts
    if message.calls:
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    return written


def finish(answer: SampledAnswer) -> str:
    """Return why an answer ended, in the protocol's words."""
    if answer.reply.message.calls:
        return "tool_calls"
    return "length" if answer.sample.stopped == StopReason.LENGTH else "stop"


def logprobs(answer: SampledAnswer) -> dict[str, Any]:
    """Return the log-probability of each sampled token, by its id."""
    pairs = zip(answer.tokens.tolist(), answer.sample.logprobs.tolist(), strict=True)
    content = [
        {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
        for token, value in pairs
    ]
    return {"content": content, "refusal": None}


def usage(answers: Sequence[SampledAnswer]) -> dict[str, Any]:
    """Return the tokens that answers took."""
    prompt = len(answers[0].prompt)
    known = answers[0].before
    cached = 0 if known is None else known.end
    sampled = sum(len(answer.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }

"""Ask a model behind an OpenAI-compatible server in messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import openai

from params.schema.chat import ChatEndpoint, ChatLimits
from tasks.chat.attempts import (
    SHOWN,
    AttemptError,
    ChatConnection,
    ServerCall,
    ask,
    connect,
    cost,
    entry,
    first_choice,
)
from tasks.chat.cached import Answer
from tasks.chat.call_budget import CallBudget, Spent
from tasks.chat.contract import NO_TEXT, ChatReply, ChatRequest

MESSAGE_TOKENS = 16  # more than a chat template adds to a message


@asynccontextmanager
async def open_endpoint(
    endpoint: ChatEndpoint, limits: ChatLimits, budget: CallBudget, section: str
) -> AsyncIterator[Answer]:
    """Keep connections to a server; yield a function that answers one request.

    The function raises RuntimeError, with the remedy, where no request can succeed. Raises
    ValueError where the key is not set.
    """
    async with connect(endpoint, limits, section) as server:
        yield partial(answer, server, budget)


async def answer(server: ChatConnection, budget: CallBudget, request: ChatRequest) -> ChatReply:
    """Return the first good answer of several attempts, or a reply with the last one's fault."""
    try:
        return await ask(
            server, budget, ServerCall(partial(_send, request), _read, most_tokens(request))
        )
    except AttemptError as error:
        return ChatReply("", fault=error.fault)


def most_tokens(request: ChatRequest) -> int:
    """Return a bound of what a request costs: a token of a prompt is a byte of it at least."""
    prompt = sum(len(each.content.encode(errors="replace")) for each in request.messages)
    return prompt + MESSAGE_TOKENS * (len(request.messages) + 1) + request.max_tokens


async def _send(request: ChatRequest, server: ChatConnection) -> Any:
    return await server.client.chat.completions.with_raw_response.create(
        model=server.endpoint.name,
        messages=[{"role": m.role, "content": m.content} for m in request.messages],  # type: ignore[misc]
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stop=list(request.stop) or openai.omit,
    )


def _read(body: object) -> tuple[ChatReply, Spent | None]:
    """Return a server's answer and its cost. Raises AttemptError where it has no text."""
    spent, prompt, completion = cost(body)
    choice = first_choice(body)
    message, finish = entry(choice, "message"), entry(choice, "finish_reason")
    text = entry(message, "content")
    if isinstance(message, dict) and not text and not entry(body, "error"):
        raise AttemptError(NO_TEXT, spent)
    if not isinstance(text, str) or not text:
        raise AttemptError("malformed", spent)
    return ChatReply(text, prompt, completion, str(finish or "")[:SHOWN]), spent

"""Answer clients of OpenAI's protocol from the policy that serve.py holds: models, chats and texts.

It is for trying a policy where there is no vLLM: one answer a request, whole, without tools; or the
log-probabilities of a given text (``echo``), as a teacher is asked for. What is asked otherwise is
refused with its name, and never left out in silence.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tasks.engines.contract import Engine, SamplingRequest, most_positions
from tasks.engines.servers.token_guard import CHATS, TEXTS
from tasks.policy import token_ids
from tasks.policy.token_ids import TokenIds
from tasks.trees.outcomes import StopReason

GREEDY = 1e-6  # the temperature that stands for 0: all of the probability is the likeliest token's
TOKENS = 16  # of an answer, at most, where a text's request says nothing, as OpenAI has it
IGNORED = frozenset({"model", "user", "store", "metadata", "stream_options"})
READ = frozenset({"messages", "prompt", "temperature", "top_p", "seed", "stop"})
OF_GIVEN = frozenset({"prompt", "echo", "logprobs", "max_tokens", "temperature"})
LIMITS = ("max_completion_tokens", "max_tokens")
NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # of other keys, what asks for nothing
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "logprobs": (False,),
    "echo": (False,),
    "tools": ([],),
    "response_format": ({"type": "text"},),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (0,)),
    "logit_bias": ({},),
}
AT_ECHO = {"logprobs": 0, "max_tokens": 0, "temperature": 1}  # what a prompt is scored with
FINISHES = {StopReason.STOP: "stop", StopReason.END: "stop", StopReason.LENGTH: "length"}
Body = Mapping[str, Any]


class Policy(Protocol):
    """What is served (serve.Served)."""

    name: str
    lock: Any

    @property
    def engine(self) -> Any:
        """Return the engine that has model and tokenizer."""


@dataclass(frozen=True)
class Answered:
    """An answer, and what it took in tokens."""

    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: Mapping[str, Any] | None = None  # of the prompt's tokens


def routes(policy: Policy) -> list[Route]:
    """Return the paths of the protocol."""

    async def models(_: Request) -> JSONResponse:
        shown = {"id": policy.name, "object": "model", "created": 0, "owned_by": "beamline"}
        return JSONResponse({"object": "list", "data": [shown]})

    async def chat(request: Request) -> JSONResponse:
        return await _answer(policy, request, partial(_answered, prompt_of=_chat_prompt), _chat)

    async def text(request: Request) -> JSONResponse:
        return await _answer(policy, request, _text, _completion)

    return [
        Route("/v1/models", models),
        Route(CHATS, chat, methods=["POST"]),
        Route(TEXTS, text, methods=["POST"]),
    ]


async def _answer(
    policy: Policy,
    request: Request,
    compute: Callable[[Policy, Body], Answered],
    written: Callable[[Answered], dict[str, Any]],
) -> JSONResponse:
    """Answer a request; one that cannot be is refused with 400 and the reason."""
    try:
        body = await request.json()
        answered = await run_in_threadpool(compute, policy, body)
    except (ValueError, TypeError, KeyError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"not understood: {error!r}"
        told = {"message": reason, "type": "invalid_request_error", "code": 400}
        return JSONResponse({"error": told}, 400)
    prompt, completion = answered.prompt_tokens, answered.completion_tokens
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    return JSONResponse(
        {
            "id": f"beamline-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": policy.name,
            **written(answered),
            "usage": {**usage, "total_tokens": prompt + completion},
        }
    )


def _chat(answered: Answered) -> dict[str, Any]:
    message = {"role": "assistant", "content": answered.text}
    choice = {"index": 0, "message": message, "finish_reason": answered.finish, "logprobs": None}
    return {"object": "chat.completion", "choices": [choice]}


def _completion(answered: Answered) -> dict[str, Any]:
    choice = {"index": 0, "text": answered.text, "finish_reason": answered.finish}
    choices = [{**choice, "logprobs": answered.logprobs}]
    return {"object": "text_completion", "choices": choices}


def _chat_prompt(tokenizer: Any, body: Body) -> str:
    """Return what the chat template makes of messages whose content is text."""
    messages = [{"role": one["role"], "content": _content(one)} for one in body["messages"]]
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError("messages: the last one has to be another one than the assistant's")
    try:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )
    except Exception as error:  # of a template: any kind
        raise ValueError(f"messages: the chat template refuses them: {error}") from error


def _content(message: Body) -> str:
    """Return the text of a message, of its parts, too. Raises ValueError for anything else."""
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not all(part.get("type") == "text" for part in parts):
        raise ValueError("messages: only content of text is read")
    return "".join(part["text"] for part in parts)


def _text_prompt(_: Any, body: Body) -> str:
    prompt = body["prompt"]
    if not isinstance(prompt, str):
        raise ValueError("prompt: write one text")
    return prompt


def _text(policy: Policy, body: Body) -> Answered:
    return _scored(policy, body) if body.get("echo") else _answered(policy, body, _text_prompt)


def _scored(policy: Policy, body: Body) -> Answered:
    """Return a prompt with the log-probabilities of its tokens, at temperature 1."""
    _check(body, OF_GIVEN)
    if any(body.get(key) != number for key, number in AT_ECHO.items()):
        raise ValueError(f"echo: write {', '.join(f'{key} {n}' for key, n in AT_ECHO.items())}")
    with policy.lock:
        engine, tokenizer = policy.engine, policy.engine.tokenizer
        ids = token_ids.of(engine.model)
        tokens = _given(body["prompt"], tokenizer, ids, most_positions(engine.model.config))
        row = torch.tensor([tokens], device=engine.model.device)
        with torch.no_grad():
            logits = engine.model(input_ids=row, use_cache=False).logits[0, :-1]
        logprobs = ids.only(logits).float().log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
    texts = tokenizer.batch_decode([[token] for token in tokens])
    said = {"tokens": texts, "token_logprobs": [None, *logprobs.tolist()], "top_logprobs": None}
    return Answered("".join(texts), "length", len(tokens), 0, said)


def _given(prompt: Any, tokenizer: Any, ids: TokenIds, positions: int | None) -> list[int]:
    """Return the tokens of a prompt, a text or ids. Raises ValueError for any other."""
    if isinstance(prompt, str):
        prompt = tokenizer.encode(prompt, add_special_tokens=False)
    if not isinstance(prompt, list) or not prompt:
        raise ValueError("prompt: write one text, or the ids of its tokens")
    if unknown := [token for token in prompt if type(token) is not int or token not in ids]:
        raise ValueError(f"prompt: {unknown[0]!r} is not the id of a token")
    if positions is not None and len(prompt) > positions:
        raise ValueError(f"the prompt has {len(prompt)} tokens, and the policy {positions}")
    return prompt


def _answered(policy: Policy, body: Body, prompt_of: Callable[[Any, Body], str]) -> Answered:
    """Sample an answer. Raises ValueError, KeyError or TypeError for what cannot be asked."""
    _check(body, READ | {*LIMITS})
    with policy.lock:
        engine, tokenizer = policy.engine, policy.engine.tokenizer
        text = prompt_of(tokenizer, body)
        tokens = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
        stop = _stops(body.get("stop"))
        room = _room(engine, len(tokens), body)
        heat = _number(body, "temperature", 1.0, 0.0, 2.0) or GREEDY
        top_p = _number(body, "top_p", 1.0, 1e-6, 1.0)
        return _sampled(engine, tokens, room, (heat, top_p, stop), int(body.get("seed") or 0))


def _sampled(
    engine: Engine, tokens: Any, room: int, way: tuple[float, float, list[str]], seed: int
) -> Answered:
    with engine.session(1, len(tokens) + room, *way) as session:
        (sample,) = session.sample([SamplingRequest(session.open(), tokens, seed, room)])
    tokenizer = engine.tokenizer  # type: ignore[attr-defined]
    text = tokenizer.decode(sample.tokens, skip_special_tokens=True)
    ends = [at for mark in way[2] if (at := text.find(mark)) >= 0]
    finish = FINISHES[StopReason(sample.stopped)]
    return Answered(text[: min(ends, default=len(text))], finish, len(tokens), len(sample.tokens))


def _check(body: Body, read: AbstractSet[str]) -> None:
    """Raise ValueError for keys that would change the answer, and are not read."""
    known = IGNORED | read
    unread = [
        f"{key}: this server does not read it"
        for key, value in body.items()
        if key not in known and value is not None and value not in NEUTRAL.get(key, ())
    ]
    if unread:
        raise ValueError(f"{'; '.join(unread)} (vLLM's server does: make serve without KIND)")


def _number(body: Body, key: str, default: float, least: float, most: float) -> float:
    value = body.get(key)
    number = default if value is None else float(value)
    if not least <= number <= most:
        raise ValueError(f"{key} {number:g}: give a number from {least:g} to {most:g}")
    return number


def _stops(given: Any) -> list[str]:
    stop = [given] if isinstance(given, str) else list(given or [])
    if not all(isinstance(text, str) and text for text in stop):
        raise ValueError("stop: write texts of one letter or more")
    return stop


def _room(engine: Any, prompt: int, body: Body) -> int:
    """Return how many tokens the answer may have. Raises ValueError where there is no room."""
    positions = most_positions(engine.model.config)
    named = next((body[key] for key in LIMITS if body.get(key) is not None), None)
    free = None if positions is None else positions - prompt
    if free is not None and free < 1:
        raise ValueError(f"the prompt has {prompt} tokens, and the policy {positions} positions")
    wanted = int(named) if named is not None else (TOKENS if "prompt" in body else free or TOKENS)
    if wanted < 1:
        raise ValueError(f"max_tokens {wanted}: give a number above 0")
    return wanted if free is None else min(wanted, free)

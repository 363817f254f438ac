"""What a request of OpenAI's protocol asks for: nothing of it is left out in silence."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tasks.dialects.chat_format import ChatMessage
from tasks.programs.messages import RefusedError, messages_of, tools_of
from tasks.trees.tree import ToolSpec

MOST_CHOICES = 16  # answers of one request
MOST_STOPS = 8
# What decides nothing that is sampled.
HARMLESS = frozenset(
    "model messages tools max_tokens max_completion_tokens stop n stream stream_options logprobs "
    "top_logprobs store metadata user service_tier safety_identifier prompt_cache_key "
    "prompt_cache_retention verbosity reasoning_effort reasoning include truncation "
    "prediction modalities".split()
)
# Of other keys, what asks for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
}


@dataclass(frozen=True)
class FixedSampling:
    """How the policy samples, which no request changes."""

    temperature: float
    top_p: float
    turn_tokens: int  # of an answer, at most
    ignored: Collection[str] = ()  # parameters of requests that do nothing


@dataclass(frozen=True)
class Asked:
    """One request, read."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    choices: int = 1
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False


def read(body: Any, sampling: FixedSampling) -> Asked:
    """Read the body of a chat request. Raises RefusedError with all that cannot be done."""
    if not isinstance(body, dict):
        raise RefusedError("the body is no JSON object")
    if faults := _faults(body, sampling):
        raise RefusedError("; ".join(faults))
    stream_options = body.get("stream_options")
    choices = _whole(body, "n", 1, MOST_CHOICES)
    tools = [] if body.get("tool_choice") == "none" else body.get("tools") or []
    return Asked(
        messages=messages_of(body.get("messages")),
        tools=specs_of(json.dumps(tools)),
        max_tokens=min(sampling.turn_tokens, _limit(body, sampling.turn_tokens)),
        stop=_stops(body.get("stop")),
        choices=choices,
        stream=body.get("stream") is True,
        stream_usage=isinstance(stream_options, dict) and bool(stream_options.get("include_usage")),
        logprobs=body.get("logprobs") is True,
    )


@lru_cache(maxsize=256)
def specs_of(tools: str) -> tuple[ToolSpec, ...]:
    """Return the tools of a request, which are the same in most. Raises RefusedError."""
    return tools_of(json.loads(tools))


def _faults(body: Mapping[str, Any], sampling: FixedSampling) -> list[str]:
    """Return a line for each parameter that would change what the policy draws, or is not kept."""
    fixed = {
        "temperature": (sampling.temperature,),
        "top_p": (sampling.top_p, 1),
        "seed": (),
        **NEUTRAL,
        "tool_choice": ("auto", "none"),
    }
    faults = []
    for key, value in body.items():
        if value is None or key in HARMLESS or key in sampling.ignored:
            continue
        if key not in fixed:
            faults.append(f"{key}: this gateway does not know it")
        elif not any(_equal(value, neutral) for neutral in fixed[key]):
            faults.append(
                f"{key} is {json.dumps(value)[:100]}, which would change what the policy draws or "
                f"cannot be kept: leave it out, or name it in program's 'ignored'"
            )
    return faults


def _equal(value: Any, neutral: Any) -> bool:
    return type(value) in (type(neutral), int, float) and bool(value == neutral)


def _whole(body: Mapping[str, Any], key: str, default: int, most: int) -> int:
    value = body.get(key)
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= most:
        raise RefusedError(f"{key} is {value!r}: write a whole number from 1 to {most}")
    return value


def _limit(body: Mapping[str, Any], turn_tokens: int) -> int:
    names = ("max_completion_tokens", "max_tokens")
    return min(_whole(body, name, turn_tokens, 2**31) for name in names)


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given or []
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise RefusedError("stop: write a text, or a list of texts")
    if len(stops) > MOST_STOPS:
        raise RefusedError(f"stop: write at most {MOST_STOPS} texts")
    return tuple(stops)

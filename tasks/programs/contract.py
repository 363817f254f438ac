"""The contract of a program: an agent that somebody else has written, and that is trained as it is.

It asks for its answers at an address of OpenAI's protocol, and returns what came of its task. In a
file of ``own/`` it is a function, which a recipe names by its path:

    async def run(task, endpoint):      # or without async
        client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key)
        ...
        return answer

``task`` has ``id``, ``kind``, ``text``, ``messages`` (all of the prompt, the text as the last one)
and ``data``; ``endpoint`` has ``base_url``, ``key``, ``model`` and ``seconds``. It returns its
answer as a text, a reward as a number, None, or both with the reward's parts as a mapping:
``{"answer": ..., "reward": ..., "parts": {...}}``. A command gets the same as JSON on its standard
input, and says what it returns in its last line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from params.schema.base import Float, Frozen, Positive, PositiveFloat
from tasks.trees.tree import Question

ANSWER, REWARD, PARTS = "answer", "reward", "parts"  # what a program may return
MOST_PARTS = 32
MOST_ANSWER = 100_000  # characters
# Parameters of a request that would change what the policy draws, or that nothing here can keep.
Ignorable = Literal[
    "temperature",
    "top_p",
    "seed",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
]


class ProgramSettings(Frozen):
    """The settings of every program."""

    seconds: PositiveFloat = 60.0  # in which it works itself; waiting for answers is not counted
    requests: Positive = 64  # of an episode, at most
    prompt_tokens: Positive = 2048  # of a request, at most: the whole conversation so far
    lanes: Positive = 64  # episodes side by side, at most
    memory_mib: Positive = 4096  # of an episode's processes, each
    # where nobody has asked for so many seconds, a round is sampled without those who still work
    patience: PositiveFloat = 10.0
    ignored: tuple[Ignorable, ...] = ()  # parameters that its requests have, and that do nothing
    repeatable: bool = True  # it asks the same again where it gets the same answers
    # without a sandbox: it may do what its user may
    trusted: bool = False
    shown: tuple[str, ...] = ()  # folders that it may read in its sandbox, beside its Python
    variables: dict[str, str] = Field(default_factory=dict)  # of its environment
    # of the gateway; another than this machine's own only with a program that is trusted
    listen: str = "127.0.0.1"
    bounds: tuple[Float, Float] = (-1e6, 1e6)  # of the reward that it returns


@dataclass(frozen=True)
class ProgramKind:
    """A kind of program: its settings, and the job that program_host.py is given.

    ``job(settings)`` is JSON: ``function`` with its file, or ``command`` with its words.
    ``python(settings)`` is the interpreter that it runs in, "" for the trainer's own.
    """

    settings: type[ProgramSettings]
    job: Callable[[Any], Mapping[str, Any]]
    python: Callable[[Any], str] = lambda settings: ""
    faults: Callable[[Any], list[str]] = lambda settings: []


@dataclass(frozen=True)
class Result:
    """What a program has returned."""

    answer: str | None = None
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


class ResultError(ValueError):
    """A program has returned something that is no result."""


def task_of(question: Question) -> dict[str, Any]:
    """Return a question as its program gets it: without its answers."""
    messages = [{"role": each.role, "content": each.content} for each in question.before]
    messages.append({"role": "user", "content": question.text})
    return {
        "id": question.id,
        "kind": question.kind,
        "text": question.text,
        "messages": messages,
        "data": json.loads(question.data) if question.data else None,
    }


def result_of(returned: Any, bounds: tuple[float, float]) -> Result:
    """Read what a program has returned. Raises ResultError for what is none."""
    if returned is None:
        return Result()
    if isinstance(returned, str):
        return Result(_answer(returned))
    if isinstance(returned, int | float):
        return Result(None, _number(REWARD, returned, bounds))
    if not isinstance(returned, dict):
        raise ResultError(
            f"it returned a {type(returned).__name__}: return a text, a number, or both"
        )
    if unknown := sorted(map(str, returned.keys() - {ANSWER, REWARD, PARTS})):
        raise ResultError(f"it returned {', '.join(unknown)}: return answer, reward and parts")
    reward = returned.get(REWARD)
    return Result(
        _answer(returned.get(ANSWER)),
        None if reward is None else _number(REWARD, reward, bounds),
        _parts(returned.get(PARTS) or {}, bounds),
    )


def _answer(given: Any) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str):
        given = json.dumps(given)
    if len(given) > MOST_ANSWER:
        raise ResultError(f"its answer has {len(given)} characters, and {MOST_ANSWER} are taken")
    return str(given.encode(errors="replace").decode())


def _parts(given: Any, bounds: tuple[float, float]) -> dict[str, float]:
    if not isinstance(given, dict) or len(given) > MOST_PARTS:
        raise ResultError(f"its parts are no mapping of at most {MOST_PARTS} names to numbers")
    return {str(name)[:64]: _number(f"part {name}", each, bounds) for name, each in given.items()}


def _number(name: str, given: Any, bounds: tuple[float, float]) -> float:
    low, high = bounds
    if isinstance(given, bool | int | float) and low <= given <= high:
        return float(given)
    raise ResultError(f"its {name} is {repr(given)[:80]}: return a number from {low:g} to {high:g}")

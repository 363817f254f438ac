"""Ask a server which log-probabilities its model gives to the tokens of a text.

It is asked as OpenAI's /completions has it, with token ids for a prompt, ``echo`` and ``logprobs``;
vLLM's server and `make serve KIND=transformers` answer it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from anyio.from_thread import start_blocking_portal
from numpy.typing import NDArray

from params.schema.teacher import ServerTeacher
from tasks.chat.attempts import (
    AttemptError,
    ChatConnection,
    ServerCall,
    ask,
    connect,
    cost,
    entry,
    first_choice,
)
from tasks.chat.cached import first_error
from tasks.chat.call_budget import CallBudget, Spent

PLACE = "teacher"
ROUNDING = 1e-3  # above 0, what a log-probability may be by rounding
Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Scored:
    """What a server says of a context of T tokens: log-probabilities [T] and texts of the tokens.

    The first token, which follows nothing, has the log-probability 0.
    """

    logprobs: Floats
    texts: tuple[str, ...]


def score(teacher: ServerTeacher, contexts: Sequence[Ints], account: Path) -> list[Scored]:
    """Return what the server says of each context, in their order.

    ``account``: the file that counts what is spent. Raises ValueError where the key is not set, and
    RuntimeError, with the remedy, where a context cannot be scored.
    """
    try:
        with start_blocking_portal(name="teacher") as portal:
            return portal.call(_score, teacher, contexts, account)
    except BaseExceptionGroup as group:
        raise first_error(group) from None


async def _score(teacher: ServerTeacher, contexts: Sequence[Ints], account: Path) -> list[Scored]:
    budget = CallBudget(account, teacher.budget, PLACE)
    room = anyio.CapacityLimiter(teacher.concurrency)
    scored: dict[int, Scored] = {}
    async with connect(teacher, teacher, PLACE) as server, anyio.create_task_group() as group:

        async def one(index: int, tokens: Ints) -> None:
            async with room:
                scored[index] = await _scored(server, budget, tokens)

        for index, tokens in enumerate(contexts):
            group.start_soon(one, index, tokens)
    return [scored[index] for index in range(len(contexts))]


async def _scored(server: ChatConnection, budget: CallBudget, tokens: Ints) -> Scored:
    call = ServerCall(partial(_send, tokens), partial(_read, len(tokens)), len(tokens))
    try:
        return await ask(server, budget, call)
    except AttemptError as error:
        raise RuntimeError(
            f"{PLACE}: {server.endpoint.url} has not scored a context of {len(tokens)} tokens "
            f"({error.fault}): start a server that answers /completions with echo and logprobs, "
            "such as vLLM's, with room for such contexts"
        ) from None


async def _send(tokens: Ints, server: ChatConnection) -> Any:
    return await server.client.completions.with_raw_response.create(
        model=server.endpoint.name,
        prompt=tokens.tolist(),
        max_tokens=0,
        temperature=1.0,
        echo=True,
        logprobs=0,
    )


def _read(count: int, body: object) -> tuple[Scored, Spent | None]:
    """Return what is said of the first ``count`` tokens, and the cost. Raises AttemptError."""
    spent, _, _ = cost(body)
    said = entry(first_choice(body), "logprobs")
    logprobs, texts = entry(said, "token_logprobs"), entry(said, "tokens")
    if not isinstance(logprobs, list) or not isinstance(texts, list):
        raise AttemptError("it returned no log-probabilities", spent, final=True)
    values, words = logprobs[1:count], texts[:count]
    if len(words) != count or len(values) != count - 1:
        fault = f"it returned log-probabilities of {min(len(logprobs), len(texts))} tokens"
        raise AttemptError(fault, spent, final=True)
    if not all(_is_logprob(value) for value in values) or not all(
        isinstance(word, str) for word in words
    ):
        raise AttemptError("it returned what is no log-probability", spent)
    return Scored(np.array([0.0, *values], np.float32), tuple(words)), spent


def _is_logprob(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) and value <= ROUNDING

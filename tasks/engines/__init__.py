"""Engines sample tokens. The contract that each of them keeps.

An engine opens a session for a batch of dialogues. A session hands out one handle per path; what
lies behind a handle (a row of a cache, or nothing) is the engine's own affair. Token ids go in;
tokens, log-probabilities and entropies come out. Text never round-trips through a tokenizer
between turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Request:
    """One turn to sample: the whole context so far, and how far it may go."""

    handle: int
    tokens: NDArray[np.int32]  # [context]
    seed: int  # of this turn; the draw depends on nothing else
    max_tokens: int


@dataclass(frozen=True)
class Sample:
    """One sampled turn: tokens, logprobs (nats, at the sampling temperature), entropies / ln|V|."""

    tokens: NDArray[np.int32]  # [T]
    logprobs: NDArray[np.float32]  # [T]
    entropies: NDArray[np.float32]  # [T]
    stopped: str  # a StopReason of tasks/trees/outcomes.py


class Session(Protocol):
    """The paths of one batch of dialogues, from their prompts to their last turns."""

    def open(self) -> int:
        """A handle for a new path."""

    def fork(self, handle: int) -> int:
        """A handle for a path that shares what ``handle`` has computed so far."""

    def close(self, handle: int) -> None:
        """Give up a path."""

    def sample(self, requests: Sequence[Request]) -> list[Sample]:
        """Sample one turn of each request, side by side; answers in the order of the requests."""


class Engine(Protocol):
    """What the sampler needs of an engine.

    Sessions that are open at one time can be used side by side, each by a thread of its own.
    """

    def replicas(self, most: int) -> Sequence[Engine]:
        """Engines of this policy, at most ``most``, whose sessions get on fastest side by side."""

    def session(
        self, paths: int, context: int, temperature: float, top_p: float, stop: Sequence[str]
    ) -> AbstractContextManager[Session]:
        """Room for ``paths`` paths of at most ``context`` tokens each."""

    def release(self) -> None:
        """Leave the machine to the learner until the next session."""


def check_room(config: Any, context: int) -> None:
    """Raises ValueError where a policy with this configuration has not so many positions."""
    room = config.max_position_embeddings
    if context > room:
        raise ValueError(
            f"prompt and response budget need {context} tokens, the policy has {room}: lower "
            "dialogue.response_tokens, or take a policy with a longer context"
        )

"""The contract of an engine: it samples tokens of a policy.

An engine opens a session for a batch of dialogues. A session returns one handle per path; what
belongs to a handle (a row of a cache, or nothing) is the engine's own matter. Token ids go in;
tokens, log-probabilities and entropies come out. Text never passes through a tokenizer between
turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from params.schema.agent import EngineSettings
from params.schema.base import Machine

if TYPE_CHECKING:
    from tasks.ledger.artifacts import Artifact
    from tasks.policy.resident import Learner


@dataclass(frozen=True)
class SamplingRequest:
    """One turn to sample."""

    handle: int
    tokens: NDArray[np.int32]  # [context] of the path, from its prompt on
    seed: int  # of this turn; the draw depends on nothing else
    max_tokens: int


@dataclass(frozen=True)
class Sample:
    """One sampled turn of T tokens."""

    tokens: NDArray[np.int32]  # [T]
    logprobs: NDArray[np.float32]  # [T] nats, at the sampling temperature, before top-p
    entropies: NDArray[np.float32]  # [T] of the same distribution, divided by ln|V|: 0 to 1
    stopped: str  # a StopReason of tasks/trees/outcomes.py
    # [context + T - 1, routers, chosen] experts that each token of the path was sent to, the last
    # one aside, which is never fed; None without mixtures of experts, or where nothing is recorded
    experts: NDArray[Any] | None = None


class SamplingSession(Protocol):
    """The paths of one batch of dialogues, from their prompts to their last turns."""

    def open(self) -> int:
        """Return the handle of a new path. Raises RuntimeError where all paths are in use."""

    def fork(self, handle: int) -> int:
        """Return the handle of a new path that shares what ``handle`` has computed so far."""

    def close(self, handle: int) -> None:
        """Release a path."""

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Sample]:
        """Sample one turn per request, all at once; results are in the order of the requests.

        Raises ValueError for a turn that may exceed the session's context.
        """


class Engine(Protocol):
    """Samples from one policy.

    Several sessions can be open at the same time, each used by a thread of its own.
    """

    def replicas(self, most: int) -> Sequence[Engine]:
        """Return up to ``most`` engines for the same policy, to be used in parallel."""

    def session(
        self, paths: int, context: int, temperature: float, top_p: float, stop: Sequence[str]
    ) -> AbstractContextManager[SamplingSession]:
        """Open a session with room for ``paths`` paths of at most ``context`` tokens each.

        A turn ends with the first of the strings ``stop`` in its text, with the end token, or at
        its limit. Raises ValueError where the policy has fewer positions than ``context``.
        """

    def release(self) -> None:
        """Release GPU memory until the next session."""


@dataclass(frozen=True)
class SamplingLoad:
    """What an engine has to hold, in plain numbers. Sizes are bytes."""

    weights: float  # of the policy, in the precision of a pass
    cast: float  # of a bfloat16 copy of its matrices; 0 where passes are in float32
    keys_values: float  # of the keys and values of a path of full length
    states: float  # of what recurrent and convolution layers keep of a path
    vocabulary: int  # logits of one token
    context: int  # tokens of a path, at most
    rows: int  # paths that are sampled at once, at most
    memory: float  # engine.memory of the recipe: a share of the GPU, or GiB on a CPU
    gpu: float | None  # the GPU's memory; None on a CPU


@dataclass(frozen=True)
class EngineKind:
    """A row of the registry of engines (``tasks.engines.ENGINES``)."""

    # Open the engine for a policy: the loaded model, its folder, settings, machine, and the paths
    # that are sampled at once, at most.
    open: Callable[[Learner, Artifact, EngineSettings, Machine, int], Engine]
    # Return bytes by part, beside what the learner holds.
    memory: Callable[[SamplingLoad], dict[str, float]]
    # Return what is missing in this environment and how to get it, or None.
    installed: Callable[[EngineSettings], str | None]
    # Bytes that the engine uses beside weights, keys and values, for an engine that takes a fixed
    # share of the GPU (engine.memory) when it starts; None for one that takes what it needs.
    reserve: float | None = None


def most_positions(config: Any) -> int | None:
    """Return how many positions a policy of this configuration has; None: there is no last one."""
    positions: int | None = getattr(
        config.get_text_config(decoder=True), "max_position_embeddings", None
    )
    return positions


def check_room(config: Any, context: int) -> None:
    """Raise ValueError where a policy of this configuration has less than ``context`` positions.

    Some recurrent policies have no last position. With longrope (arXiv 2402.13753), a context that
    grows beyond its original length rotates all its positions in another way, and what is cached of
    it, or what another context of a batch makes of it, is wrong.
    """
    text = config.get_text_config(decoder=True)
    room = most_positions(config)
    if room is not None and context > room:
        raise ValueError(
            f"prompt and response budget need {context} tokens, the policy has {room}: lower "
            "dialogue.response_tokens, or take a policy with a longer context"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    for one in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        original = one.get("original_max_position_embeddings")
        if one.get("rope_type") == "longrope" and original and context > original:
            raise ValueError(
                f"prompt and response budget need {context} tokens, and the policy's positions "
                f"(longrope) change beyond {original}: lower dialogue.response_tokens, or take a "
                "policy with other rotary positions"
            )

"""What is kept of an episode, so that it can be replayed and compared."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from tasks.environments.seen import observed
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation, Question

COMPARED = ("outcome", "text", "reward", "terminated", "truncated", "state", "actions")


@dataclass
class WorldStep:
    """One act and what answered it. An act that did not reach the world is not replayed."""

    call: Call
    seen: Observation
    reached: bool


@dataclass
class Episode:
    """An episode, with all that was done in it and seen."""

    task: Question
    place: int  # the slot of its process in the pool
    seed: int = 0
    first: Observation | None = None  # None until it has started
    steps: list[WorldStep] = field(default_factory=list)
    live: bool = False  # whether its process should have it in the state after the last step

    @property
    def last(self) -> Observation:
        """Return what the agent sees now."""
        seen = self.steps[-1].seen if self.steps else self.first
        assert seen is not None
        return seen

    def past(self) -> list[tuple[str, list[Any], Observation]]:
        """Return the requests that replay the episode, with what each has shown before."""
        if self.live or self.first is None:
            return []
        reached = [(*act_request(step.call), step.seen) for step in self.steps if step.reached]
        return [(*self.beginning(), self.first), *reached]

    def beginning(self) -> tuple[str, list[Any]]:
        """Return the request that starts the episode."""
        return "start", [asdict(self.task), self.seed]


def act_request(call: Call) -> tuple[str, list[Any]]:
    """Return the request of one act."""
    return "act", [call.tool, call.argument, dict(call.values)]


def seed_of(task: Question) -> int:
    """Return the seed of an episode: "seed" in the task's data, else a digest of its id.

    Raises ValueError for data that are no JSON object, and for a seed that is no integer.
    """
    try:
        data = json.loads(task.data or "{}")
        seed = data.get("seed")
    except (ValueError, RecursionError, AttributeError):
        raise ValueError(f"the data of the task {task.id} are no JSON object") from None
    if seed is None:
        return int.from_bytes(hashlib.blake2b(task.id.encode(), digest_size=4).digest(), "big")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"the seed of the task {task.id} is {seed!r}: write an integer")
    return seed


def failed(outcome: Outcome, text: str) -> Observation:
    """Return an observation that ends an episode for a reason that is not its task's."""
    return Observation(outcome, text, truncated=True)


def read(answer: Any) -> Observation:
    """Return the observation in a host's answer; a failure where it breaks the contract."""
    if isinstance(answer, Observation):
        return answer
    try:
        return observed(answer["seen"])
    except (ValueError, TypeError, KeyError) as error:
        return failed(Outcome.WORLD_FAILED, str(error))


def same(first: Observation, second: Observation) -> bool:
    """Return whether two observations are equal in all that an agent, or its reward, can see."""
    return all(getattr(first, name) == getattr(second, name) for name in COMPARED)


def differs(before: Observation, now: Observation) -> Observation:
    """Return the failure REPLAY_DIFFERS, which names what is different."""
    different = [name for name in COMPARED if getattr(before, name) != getattr(now, name)]
    shown = "; ".join(
        f"{name} was {getattr(before, name)!r}, is {getattr(now, name)!r}"[:1000]
        for name in different
    )
    return failed(Outcome.REPLAY_DIFFERS, shown)

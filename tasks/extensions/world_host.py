"""The episodes in one process of a pool: what tasks/environments/episodes.py asks there."""

from __future__ import annotations

import importlib
import inspect
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from numbers import Real
from typing import Any

import numpy as np

from tasks.extensions import user_code_worker
from tasks.extensions.plain_values import plain
from tasks.trees.tree import Call, Message, Observation, Question

OPTIONAL = ("fork", "end", "solve", "close")  # methods that a world need not have
States = tuple[Any, Any]
LOST = {"lost": True}  # this process does not have the episode


class WorldHost:
    """Worlds by handle. Each method takes and returns what JSON can hold.

    ``job``: the reference of a ``world``; its ``settings``, None where it takes none, with the
    reference of their ``settings_type``; and an ``adapter`` for a class that has no ``start``.
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        held = user_code_worker.load(job["world"])
        self.kind = held if hasattr(held, "start") else user_code_worker.load(job["adapter"])(held)
        self.settings: list[Any] = []
        if job["settings"] is not None and _takes_one(self.kind):
            self.settings = [_type(job["settings_type"])(**job["settings"])]
        self.worlds: dict[int, Any] = {}
        self.chances: dict[int, States] = {}  # of the random numbers of each episode

    def abilities(self) -> list[str]:
        """Return the optional methods that the world has."""
        return [name for name in OPTIONAL if callable(getattr(self.kind, name, None))]

    def start(self, handle: int, task: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Begin an episode."""
        before = tuple(Message(**message) for message in task["before"])
        question = Question(**{**task, "answers": tuple(task["answers"]), "before": before})
        with suppress(Exception):  # an episode that is replayed under its handle
            self.close(handle)
        self.chances[handle] = seeded(seed)
        with self._chance(handle):
            world = self.kind(*self.settings)
            self.worlds[handle] = world
            return {"seen": _seen(world.start(question, seed), "start")}

    def act(
        self, handle: int, tool: str, argument: str, values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Do one act."""
        if handle not in self.worlds:
            return LOST
        with self._chance(handle):
            return {"seen": _seen(self.worlds[handle].act(Call(tool, argument, values)), "act")}

    def fork(self, handle: int, new: int) -> bool:
        """Copy an episode; return whether there is a copy."""
        if handle not in self.worlds:
            return False
        with self._chance(handle, kept=False):
            copy = self.worlds[handle].fork()
        if any(copy is world for world in self.worlds.values()) or not hasattr(copy, "act"):
            raise TypeError(f"fork returned {type(copy).__name__}: return a new world")
        self.worlds[new], self.chances[new] = copy, self.chances[handle]
        return True

    def end(self, handle: int, text: str) -> dict[str, Any]:
        """Tell an episode that its agent has stopped acting."""
        if handle not in self.worlds:
            return LOST
        with self._chance(handle):
            last = self.worlds[handle].end(text)
        return {"seen": None if last is None else _seen(last, "end")}

    def solve(self, handle: int) -> dict[str, Any]:
        """Return the expert's next act as tool and argument; None where it has none."""
        if handle not in self.worlds:
            return LOST
        with self._chance(handle, kept=False):  # a replay does not ask for it
            call = self.worlds[handle].solve()
        if call is None:
            return {"call": None}
        words = (getattr(call, "tool", None), getattr(call, "argument", None))
        if not all(isinstance(word, str) for word in words):
            shown = repr(call)[:200]
            raise TypeError(f"solve returned {shown}: return a Call of two texts, or None")
        return {"call": list(words)}

    def close(self, handle: int) -> None:
        """Release an episode."""
        world = self.worlds.pop(handle, None)
        self.chances.pop(handle, None)
        if hasattr(world, "close"):
            world.close()

    @contextmanager
    def _chance(self, handle: int, kept: bool = True) -> Iterator[None]:
        """Let the block draw the random numbers of an episode, and nobody else's.

        Without ``kept`` its next block draws the same ones again.
        """
        others = states()
        set_states(self.chances[handle])
        try:
            yield
        finally:
            if kept and handle in self.chances:
                self.chances[handle] = states()
            set_states(others)


def states() -> States:
    """Return the states of the random numbers that a process shares: Python's and NumPy's."""
    return random.getstate(), np.random.get_state()


def set_states(given: States) -> None:
    """Go on from the states that ``states`` has returned."""
    random.setstate(given[0])
    np.random.set_state(given[1])


def seeded(seed: int) -> States:
    """Return the states after a seed, and leave those of the process as they are."""
    others = states()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        return states()
    finally:
        set_states(others)


def _takes_one(kind: Any) -> bool:
    """Return whether a class is made from one argument: its settings."""
    try:
        inspect.signature(kind).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def _type(reference: str) -> Any:
    """Return a class by ``<module>:<qualified name>``."""
    module, _, name = reference.partition(":")
    result = importlib.import_module(module)
    for part in name.split("."):
        result = getattr(result, part)
    return result


def _seen(observation: Observation | str, method: str) -> dict[str, Any]:
    """Return the fields of an observation, with plain values for those of NumPy and torch."""
    if isinstance(observation, str):
        observation = Observation("ok", observation)
    if not isinstance(observation, Observation):
        kind = type(observation).__name__
        raise TypeError(f"{method} returned {kind}: return a text or an Observation")
    seen = {field.name: plain(getattr(observation, field.name)) for field in fields(observation)}
    if isinstance(seen["reward"], Real):
        seen["reward"] = float(seen["reward"])
    if seen["reward"] != seen["reward"] or seen["reward"] in (float("inf"), float("-inf")):
        raise ValueError(f"{method} returned the reward {seen['reward']}, which is not finite")
    for name, value in seen.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"{method} returned as {name} what is no JSON ({error})") from None
    return seen

"""The episodes in one process of a pool: what tasks/environments/episodes.py asks there."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from numbers import Real
from typing import Any

import numpy as np

from tasks.extensions import user_code_worker
from tasks.trees.tree import Call, Message, Observation, Question

OPTIONAL = ("fork", "end", "solve", "close")  # methods that a world need not have
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

    def abilities(self) -> list[str]:
        """Return the optional methods that the world has."""
        return [name for name in OPTIONAL if callable(getattr(self.kind, name, None))]

    def start(self, handle: int, task: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Begin an episode."""
        before = tuple(Message(**message) for message in task["before"])
        question = Question(**{**task, "answers": tuple(task["answers"]), "before": before})
        with suppress(Exception):  # an episode that is replayed under its handle
            self.close(handle)
        world = self.kind(*self.settings)
        self.worlds[handle] = world
        return {"seen": _seen(world.start(question, seed), "start")}

    def act(
        self, handle: int, tool: str, argument: str, values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Do one act."""
        if handle not in self.worlds:
            return LOST
        return {"seen": _seen(self.worlds[handle].act(Call(tool, argument, values)), "act")}

    def fork(self, handle: int, new: int) -> bool:
        """Copy an episode; return whether there is a copy."""
        if handle not in self.worlds:
            return False
        copy = self.worlds[handle].fork()
        if any(copy is world for world in self.worlds.values()) or not hasattr(copy, "act"):
            raise TypeError(f"fork returned {type(copy).__name__}: return a new world")
        self.worlds[new] = copy
        return True

    def end(self, handle: int, text: str) -> dict[str, Any]:
        """Tell an episode that its agent has stopped acting."""
        if handle not in self.worlds:
            return LOST
        last = self.worlds[handle].end(text)
        return {"seen": None if last is None else _seen(last, "end")}

    def solve(self, handle: int) -> dict[str, Any]:
        """Return the expert's next act as tool and argument; None where it has none."""
        if handle not in self.worlds:
            return LOST
        call = self.worlds[handle].solve()
        return {"call": None if call is None else [call.tool, call.argument]}

    def close(self, handle: int) -> None:
        """Release an episode."""
        world = self.worlds.pop(handle, None)
        if hasattr(world, "close"):
            world.close()


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
    """Return the fields of an observation, with plain numbers for those of numpy."""
    if isinstance(observation, str):
        observation = Observation("ok", observation)
    if not isinstance(observation, Observation):
        kind = type(observation).__name__
        raise TypeError(f"{method} returned {kind}: return a text or an Observation")
    seen = {field.name: getattr(observation, field.name) for field in fields(observation)}
    if isinstance(seen["reward"], Real | np.bool_):
        seen["reward"] = float(seen["reward"])
    for flag in ("terminated", "truncated"):
        if isinstance(seen[flag], np.bool_):
            seen[flag] = bool(seen[flag])
    if seen["reward"] != seen["reward"] or seen["reward"] in (float("inf"), float("-inf")):
        raise ValueError(f"{method} returned the reward {seen['reward']}, which is not finite")
    return seen

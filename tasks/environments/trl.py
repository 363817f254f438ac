"""A class that was written for TRL's ``environment_factory`` is a world as it is.

TRL (1.16) makes an object without arguments and calls ``reset(**row)`` with all columns of a row of
the dataset, ``prompt`` among them; what that returns is added to the prompt. Each public method is
a tool, whose schema comes from its types and its docstring. What a tool returns is shown as
``str(result)``, an error as ``str({"error": message})``. ``get_reward()``, where there is one, is
called once when the agent has stopped. The same happens here, so transcripts are equal.

What differs: a call whose arguments do not fit the schema is refused before the method sees it. TRL
sets no seed; here ``random`` and ``numpy.random`` are seeded before ``reset``, and each episode has
a state of them of its own. TRL uses an object for many episodes, here each has a new one.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tasks.environments.trl_schema import spec_of
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation, Question, ToolSpec

NO_TOOLS = ("reset", "get_reward")  # public methods that are no tools


def world_of(cls: type) -> type:
    """Return a World (contract.py) whose episodes are objects of a class for TRL.

    Raises ValueError with all that is wrong with the class; TRL would refuse it, too.
    """
    if "gymnasium" in {base.__module__.partition(".")[0] for base in cls.__mro__}:
        raise ValueError(
            f"{cls.__name__} is an environment of gymnasium, whose acts have no names and texts: "
            "write a class with start and act that uses it"
        )
    held = {"tools": _specs(cls), "made": cls, "__doc__": cls.__doc__, "__module__": cls.__module__}
    return type(cls.__name__, (_Episode,), held)


def _specs(cls: type) -> list[ToolSpec]:
    faults: list[str] = []
    specs = []
    for name, method in methods(cls):
        try:
            specs.append(spec_of(method))
        except ValueError as error:
            faults.append(f"{cls.__name__}: method {name}: {error}")
    if not specs and not faults:
        faults.append(f"{cls.__name__} has no public method but reset: give the agent a tool")
    if faults:
        raise ValueError("; ".join(faults))
    return specs


def methods(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the tools of a class, in the order of their names, as TRL lists them."""
    for name, method in inspect.getmembers(cls, predicate=inspect.isfunction):
        if name not in NO_TOOLS and not name.startswith("_"):
            yield name, method


# ---------------------------------------------------------------- one episode


class _Episode:
    """One object of the class, and the loop of its async methods."""

    tools: Sequence[ToolSpec]
    made: type

    def __init__(self) -> None:
        self._loop: asyncio.Runner | None = None
        self._environment: Any = None

    def start(self, task: Question, seed: int) -> str:
        """Make an object, reset it with the task's row, and return what it says."""
        self._environment = self.made()
        return _text(self._result(self._environment.reset(**self._row(task))), none="")

    def act(self, call: Call) -> Observation:
        """Call the method; an error of it is a result that the agent reads."""
        try:
            method = getattr(self._environment, call.tool)
            return Observation(Outcome.OK, _text(self._result(method(**call.values))))
        except Exception as error:
            return Observation(Outcome.ERROR, str({"error": str(error)}))

    def end(self, text: str) -> Observation | None:
        """Return the reward, where the class gives one; None for an episode without.

        It is the episode's score, too, as far as it lies between 0 and 1.
        """
        if not callable(getattr(self.made, "get_reward", None)):
            return None
        reward = self._result(self._environment.get_reward())
        if reward is None:
            return None
        score = min(1.0, max(0.0, float(reward)))
        return Observation(Outcome.OK, "", reward=float(reward), info={"score": score})

    def close(self) -> None:
        """Close the loop of async methods."""
        if self._loop:
            self._loop.close()

    def _row(self, task: Question) -> dict[str, Any]:
        """Return the columns for ``reset``; ``prompt`` only where it is taken."""
        row = dict(json.loads(task.data).get("row") or {}) if task.data else {}
        taken = inspect.signature(self.made.reset).parameters  # type: ignore[attr-defined]
        if "prompt" in taken or any(one.kind == one.VAR_KEYWORD for one in taken.values()):
            said = [{"role": one.role, "content": one.content} for one in task.before]
            row.setdefault("prompt", [*said, {"role": "user", "content": task.text}])
        return row

    def _result(self, result: Any) -> Any:
        """Return what a method returned; what an async method promised is waited for."""
        if not inspect.iscoroutine(result):
            return result
        self._loop = self._loop or asyncio.Runner()
        return self._loop.run(result)


def _text(result: Any, none: str = "None") -> str:
    """Return a result as TRL shows it; of a list of parts, the texts, and the names of others."""
    if result is None:
        return none
    if not isinstance(result, list):
        return str(result)
    if not all(isinstance(part, dict) and "type" in part for part in result):
        return str(result)
    return "\n".join(
        str(part.get("text", "")) if part["type"] == "text" else f"[{part['type']}]"
        for part in result
    )

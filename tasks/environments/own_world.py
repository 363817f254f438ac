"""A user's world: a class in a file of ``own/`` becomes an EnvironmentKind.

The class has ``start`` and ``act``, as ``World`` in contract.py. It may have settings of its own in
a nested class ``Settings``, and these attributes: ``tools`` (else the agent acts in free text),
``task`` (the text of every task; else the first line of its docstring), ``tasks``, a function
(settings, split, count, seed) -> questions, and ``repeatable = False``.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from params.schema.base import Frozen
from tasks.environments.contract import FREE_TEXT, EnvironmentKind
from tasks.environments.episodes import ADAPTER
from tasks.environments.record import seed_of
from tasks.extensions import user_code_worker
from tasks.extensions.checks import making_faults, shown_signature, takes
from tasks.extensions.named import Named, find
from tasks.tools.own_tool import own_settings, spec_faults, with_seconds
from tasks.trees.tree import Question, ToolSpec

SPLITS = ("train", "validation", "test")
METHODS = {  # of a world -> its parameters; True: it must have the method
    "start": (("task", "seed"), True),
    "act": (("call",), True),
    "fork": ((), False),
    "end": (("text",), False),
    "solve": ((), False),
    "close": ((), False),
}


def environment_kind(name: str) -> EnvironmentKind:
    """Return the kind of environment that a recipe names.

    Raises ValueError where the name stands for nothing, or for what can be no world.
    """
    named = find("environment", name)
    return named.held if isinstance(named.held, EnvironmentKind) else kind_of(named)


def kind_of(named: Named) -> EnvironmentKind:
    """Return the kind of a user's class. Raises ValueError with all that is wrong with it."""
    where = named.reference
    world = _world(named.held, where)
    settings = own_settings(world, where)
    faults = [*_method_faults(world), *making_faults(world)]
    if faults:
        raise ValueError("; ".join(f"{where}: {fault}" for fault in faults))
    return EnvironmentKind(
        with_seconds(settings),
        where,
        partial(_specs, world, where),
        partial(_tasks, world, where),
        partial(_faults, world, where),
        getattr(world, "repeatable", True),
    )


def _world(held: Any, where: str) -> Any:
    """Return the class of a world; one written for TRL, with ``reset``, is adapted."""
    if not isinstance(held, type):
        kind = type(held).__name__
        raise ValueError(f"{where} is a {kind}: name a class with start and act")
    if not hasattr(held, "start") and hasattr(held, "reset"):
        return user_code_worker.load(ADAPTER)(held)
    return held


def _method_faults(world: type) -> list[str]:
    faults = []
    for name, (parameters, needed) in METHODS.items():
        definition = f"def {name}({', '.join(('self', *parameters))})"
        method = getattr(world, name, None)
        if method is None and needed:
            faults.append(f"the class has no method {name}: write {definition}")
        elif inspect.iscoroutinefunction(method):
            faults.append(f"{name} is async, and worlds are not: write {definition}")
        elif method is not None and not takes(method, 1 + len(parameters)):
            written = f"{name}{shown_signature(method)}"
            faults.append(f"{written} has other parameters: write {definition}")
    return faults


def _faults(world: Any, where: str, settings: Frozen) -> list[str]:
    """Return one line for each description of a tool that cannot work."""
    try:
        specs = _specs(world, where, settings)
    except ValueError as error:
        return [str(error)]
    return [f"{where}: {fault}" for spec in specs for fault in spec_faults(spec)]


def _specs(world: Any, where: str, settings: Frozen) -> Sequence[ToolSpec]:
    """Return the tools of a world: a list, or a function of the settings, or of nothing."""
    held = getattr(world, "tools", None) or [FREE_TEXT]
    try:
        with user_code_worker.ending_forks():
            if callable(held):
                held = held(settings) if takes(held, 1) else held()
            return [_spec(entry) for entry in held]
    except Exception as error:
        raise ValueError(
            f"{where}: tools is no list of ToolSpec, or of mappings with name, description and "
            f"parameters: {user_code_worker.describe(error)}"
        ) from error


def _spec(entry: Any) -> ToolSpec:
    return entry if isinstance(entry, ToolSpec) else ToolSpec(**entry)


def _tasks(
    world: Any, where: str, settings: Frozen, split: str, count: int, seed: int
) -> list[Question]:
    """Return the tasks of a split: the class's own, or numbered ones with drawn seeds."""
    method: Callable[..., Any] | None = getattr(world, "tasks", None)
    if method is None:
        return _numbered(world, split, count, seed)
    try:
        with user_code_worker.ending_forks():
            tasks = list(method(settings, split, count, seed))
    except Exception as error:
        raise ValueError(f"{where}: tasks failed: {user_code_worker.describe(error)}") from error
    for task in tasks:
        if not isinstance(task, Question):
            kind = type(task).__name__
            raise ValueError(f"{where}: tasks returned a {kind}: return a list of Question")
        seed_of(task)
    return tasks


def _numbered(world: Any, split: str, count: int, seed: int) -> list[Question]:
    """Return tasks of one text that differ in their seeds; no two splits share one."""
    name = world.__name__.lower()
    text = getattr(world, "task", "") or (inspect.getdoc(world) or name).splitlines()[0]
    draws = random.Random(f"{seed}/{split}").sample(range(2**30), count)
    first = Question("", name, text, ())
    return [
        replace(
            first,
            id=f"{name}-{split}-{number}",
            data=json.dumps({"seed": len(SPLITS) * draw + SPLITS.index(split)}),
        )
        for number, draw in enumerate(draws)
    ]

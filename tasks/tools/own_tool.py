"""A user's tool: what a file of ``own/`` holds becomes a ToolKind.

That is a function, whose type hints and docstring tell the agent how to call it; a class with
``__call__``, and settings of its own in a nested class ``Settings``; or a ToolKind. Functions and
classes run in processes of their own (tasks/extensions/pool.py), with a time limit.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jsonschema
from pydantic import create_model

from params.schema.base import Frozen, PositiveFloat
from tasks.extensions import arguments, user_code_worker
from tasks.extensions.checks import making_faults
from tasks.extensions.named import Named, find
from tasks.extensions.pool import Pool, Reply, open_pool
from tasks.tools.contract import Opening, OpenTool, ToolKind
from tasks.tools.guarded_tool import guarded
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation, ToolSpec

SECONDS = 10.0  # of one call, where the recipe does not say
HOST = "tasks/extensions/tool_host.py:ToolHost"
FAILURES = {  # of a reply -> outcome of the call
    user_code_worker.RAISED: Outcome.ERROR,
    user_code_worker.AWAY: Outcome.UNAVAILABLE,
    user_code_worker.NOT_JSON: Outcome.ERROR,
    user_code_worker.TIMEOUT: Outcome.WALL_TIMEOUT,
    user_code_worker.TOO_LARGE: Outcome.OUTPUT_LIMIT,
    user_code_worker.DIED: Outcome.KILLED,
}
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]+")


def tool_kind(name: str) -> ToolKind:
    """Return the kind of tool that a recipe names.

    Raises ValueError where the name stands for nothing, or for what can be no tool.
    """
    named = find("tools", name)
    return named.held if isinstance(named.held, ToolKind) else kind_of(named)


@contextmanager
def open_tool(name: str, settings: Frozen, opening: Opening) -> Iterator[OpenTool]:
    """Open the tool that a recipe names; one that a user has written raises no errors in calls."""
    with tool_kind(name).open(settings, opening) as tool:
        yield guarded(tool) if ".py" in name else tool


def kind_of(named: Named) -> ToolKind:
    """Return the kind of a user's function or class. Raises ValueError with what is wrong."""
    held, where = named.held, named.reference
    spec = spec_of(held, where)
    settings = with_seconds(own_settings(held, where))
    return ToolKind(
        settings,
        partial(_open, where, spec),
        repeatable=getattr(held, "repeatable", True),
        names=lambda settings: [spec.name],
    )


def offered(tools: Mapping[str, Frozen]) -> list[str]:
    """Return the names that an agent calls a recipe's tools by, as far as the settings tell."""
    names: list[str] = []
    for name, settings in tools.items():
        of_kind = tool_kind(name).names
        names += of_kind(settings) if of_kind else [name.rpartition(":")[2]]
    return names


def spec_of(held: Any, where: str) -> ToolSpec:
    """Return what an agent is told about a user's function or class."""
    if isinstance(held, type):
        if not inspect.isfunction(getattr(held, "__call__", None)):  # noqa: B004
            raise ValueError(f"{where}: the class has no __call__: give it one, or name a function")
        own_settings(held, where)
        if faults := making_faults(held):
            raise ValueError(f"{where}: {'; '.join(faults)}")
        call: Any = partial(held.__call__, None)
        hinted: Any = held.__call__
        docs = [held.__doc__ or "", held.__call__.__doc__ or ""]
        name = str(getattr(held, "name", "")) or _snake(held.__name__)
    elif inspect.isfunction(held):
        call, hinted, docs, name = held, held, [held.__doc__ or ""], held.__name__
    else:
        kind = type(held).__name__
        raise ValueError(f"{where} is a {kind}: name a function, a class with __call__ or ToolKind")
    description = next((arguments.summary(doc) for doc in docs if doc.strip()), "")
    if not description:
        raise ValueError(f"{where}: it has no docstring: say there what the tool does")
    meanings = "\n\n".join(["", *(inspect.cleandoc(doc) for doc in docs)])
    model = arguments.model_of(call, where, meanings, hinted)
    spec = ToolSpec(name, description, arguments.schema_of(model))
    faults = spec_faults(spec)
    if faults:
        raise ValueError(f"{where}: {'; '.join(faults)}")
    return spec


def spec_faults(spec: ToolSpec) -> list[str]:
    """Return what is wrong with a user's description of a tool."""
    faults = []
    if not _TOOL_NAME.fullmatch(spec.name):
        faults.append(f"the tool's name {spec.name!r} has other than letters, digits, '_' and '-'")
    if spec.parameters.get("type") != "object":
        faults.append(f"the parameters of {spec.name} are no JSON schema of type 'object'")
    try:
        jsonschema.Draft202012Validator.check_schema(dict(spec.parameters))
    except jsonschema.SchemaError as error:
        faults.append(f"the parameters of {spec.name} are no JSON schema: {error.message[:200]}")
    return faults


def own_settings(held: Any, where: str) -> type[Frozen]:
    """Return the settings that a user's class declares, else settings without a key."""
    settings = getattr(held, "Settings", Frozen)
    if not (isinstance(settings, type) and issubclass(settings, Frozen)):
        raise ValueError(
            f"{where}: its Settings are no section: write class Settings(Frozen), with Frozen from "
            "beamline.settings"
        )
    return settings


def with_seconds(settings: type[Frozen]) -> type[Frozen]:
    """Return settings with the time limit of a call beside a user's own."""
    if "seconds" in settings.model_fields:
        return settings
    seconds: Any = (PositiveFloat, SECONDS)
    return create_model("Settings", __base__=settings, seconds=seconds)


@contextmanager
def _open(where: str, spec: ToolSpec, settings: Any, opening: Opening) -> Iterator[OpenTool]:
    held = user_code_worker.load(where)
    field_names = set(own_settings(held, where).model_fields)
    job = {"reference": where, "settings": settings.model_dump(mode="json", include=field_names)}
    with open_pool(HOST, job, opening.workers, settings.seconds) as pool:
        yield OpenTool([spec], partial(_run, pool))


def _run(pool: Pool, calls: Sequence[Call]) -> list[Observation]:
    return [_read(reply) for reply in pool.call_all([[dict(call.values)] for call in calls])]


def _read(reply: Reply) -> Observation:
    if reply.failure:
        return Observation(FAILURES[reply.failure], reply.message)
    return Observation(*reply.value)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()

"""The tools of MCP servers: programs that this one starts, or services at an address.

Each server says itself which tools it has; the agent gets their names, descriptions and schemas
(https://modelcontextprotocol.io). A server that goes away is connected to again. What it keeps
between calls is shared by all rollouts, and is lost when it goes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jsonschema

from tasks.tools.contract import Opening, OpenTool, ToolKind
from tasks.tools.mcp_settings import (
    McpTools,
    plain_name,
    secrets_of,
    setting_faults,
    shown,
    without_secrets,
)
from tasks.tools.recording import NOT_RECORDED, replayed_specs
from tasks.tools.schema import first_fault
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation, ToolSpec

if TYPE_CHECKING:
    from tasks.tools.mcp_connection import Connection

NAME = "mcp"  # of this kind of tool, in a recipe
SCHEMA = 50_000  # characters of a tool's schema, at most: more has no room in a prompt
DESCRIPTION = 20_000  # characters of a tool's description, at most
SHOWN = 300  # characters of a server's words in a message


@contextmanager
def open_servers(settings: McpTools, opening: Opening) -> Iterator[OpenTool]:
    """Start or reach all servers, and keep them until the block ends.

    Raises ValueError for a server that cannot be reached, lacks a tool that ``only`` names, or has
    a tool whose schema is none. A replay reaches no server: it has the tools of the recorded run.
    """
    recorded = replayed_specs(NAME)
    if recorded is not None:
        gone = Observation(Outcome.UNAVAILABLE, NOT_RECORDED)
        yield OpenTool(recorded, lambda calls: [gone for _ in calls])
        return
    from tasks.tools.mcp_connection import connected  # takes a second

    with connected(settings) as (call, connections):
        offered = _named(connections)
        secrets = secrets_of(settings.servers.values())

        def run(calls: Sequence[Call]) -> list[Observation]:
            known = [offered.get(one.tool) for one in calls]
            requests = [
                (offer[0], offer[1].name, dict(one.values))
                for one, offer in zip(calls, known, strict=True)
                if offer
            ]
            answers = iter(call(requests, opening.workers))
            return [
                _shown(next(answers), settings.characters, secrets)
                if offer
                else Observation(Outcome.NO_SUCH_TOOL, f"no tool is called {one.tool}")
                for one, offer in zip(calls, known, strict=True)
            ]

        specs = [_spec(name, tool, secrets) for name, (_, tool) in offered.items()]
        yield OpenTool(specs, run)


def _named(connections: Mapping[str, Connection]) -> dict[str, tuple[Connection, Any]]:
    """Return the tools by the name that the agent calls, in the order of servers and tools.

    A name that several servers use is preceded by the server's name in each of them.
    """
    written = [
        (server, connection, tool, plain_name(tool.name))
        for server, connection in connections.items()
        for tool in connection.offered.values()
    ]
    uses = Counter(plain for *_, plain in written)
    named: dict[str, tuple[Connection, Any]] = {}
    for server, connection, tool, plain in written:
        name = plain if uses[plain] == 1 else f"{server}_{plain}"
        if name in named:
            raise ValueError(
                f"tools.mcp: server {server} has two tools that would be called {name}: choose one "
                "in its setting only"
            )
        named[name] = (connection, tool)
    return named


def _spec(name: str, tool: Any, secrets: Mapping[str, str]) -> ToolSpec:
    """Return what the agent is told. Raises ValueError for a schema that cannot be used."""
    schema = tool.input_schema
    description = shown(tool.description or tool.title or name, secrets)
    fault = _schema_fault(schema)
    if len(description) > DESCRIPTION:
        fault = f"its description has more than {DESCRIPTION} characters"
    if fault:
        raise ValueError(
            f"tools.mcp: the schema of the server's tool {name} cannot be used: "
            f"{shown(fault, secrets)[:SHOWN]}: "
            "leave the tool out with the server's setting only"
        )
    return ToolSpec(name, description, _part_without_secrets(schema, secrets))


def _part_without_secrets(part: Any, secrets: Mapping[str, str]) -> Any:
    if isinstance(part, Mapping):
        return {
            without_secrets(key, secrets): _part_without_secrets(value, secrets)
            for key, value in part.items()
        }
    if isinstance(part, list):
        return [_part_without_secrets(value, secrets) for value in part]
    return without_secrets(part, secrets) if isinstance(part, str) else part


def _schema_fault(schema: Mapping[str, Any]) -> str:
    if schema.get("type") != "object":
        return "its type is not object"
    try:
        written = json.dumps(schema)
        if len(written) > SCHEMA:
            return f"it has more than {SCHEMA} characters"
        if "patternProperties" in written:
            return "it has patternProperties, whose patterns cannot be checked in bounded time"
        if elsewhere := sorted(_elsewhere(schema)):
            return f"it refers to {elsewhere[0]}, which is outside the schema"
        jsonschema.validators.validator_for(dict(schema)).check_schema(dict(schema))
        first_fault(schema, {})  # references that have no end, or none to refer to
    except jsonschema.SchemaError as error:
        return error.message
    except RecursionError:
        return "its parts are nested too deeply, or refer to themselves without an end"
    except TimeoutError as error:
        return str(error)
    except Exception as error:  # of a library, for what it did not expect in a schema
        return f"it is no JSON schema: {error}"
    return ""


def _elsewhere(part: Any) -> Iterator[str]:
    """Yield the references of a schema that a check would have to fetch."""
    if isinstance(part, Mapping):
        for key, value in part.items():
            if key in ("$ref", "$dynamicRef") and not str(value).startswith("#"):
                yield str(value)
            yield from _elsewhere(value)
    elif isinstance(part, list):
        for value in part:
            yield from _elsewhere(value)


def _shown(answer: Observation, characters: int, secrets: Mapping[str, str]) -> Observation:
    """Return the observation with a text that may be shown: no secret, safe, cut."""
    text = shown(answer.text, secrets)
    if len(text) <= characters:
        return Observation(answer.outcome, text)
    outcome = Outcome.OUTPUT_LIMIT if answer.outcome == Outcome.OK else answer.outcome
    return Observation(outcome, text[:characters])


def names(settings: McpTools) -> list[str]:
    """Return the names of the tools that the settings choose; others only the servers know."""
    return [name for server in settings.servers.values() for name in server.only or ()]


TOOL = ToolKind(McpTools, open_servers, setting_faults, repeatable=False, names=names)

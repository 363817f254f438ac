"""The settings of MCP servers, and the secrets that these get.

Values of environment variables are named in the settings and never stand in them, so none is in a
recipe, a key or a commit; where a server repeats one, its name is shown instead.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, model_validator

from params.schema.base import Frozen, Positive, PositiveFloat
from tasks.tools.recording import replay_folder
from tasks.trees.words import safe

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]+$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
SHORTEST_SECRET = 4  # characters; a shorter value is no secret, and would be found everywhere


class McpServer(Frozen):
    """One server: a command, whose process ends with the run, or the address of a service."""

    command: tuple[str, ...] = ()  # speaks MCP by its standard input and output
    url: str | None = None  # speaks MCP by streamable HTTP
    environment: tuple[Variable, ...] = ()  # variables of this process that the command gets, too
    headers: Mapping[str, Variable] = {}  # header of HTTP -> the variable that holds its value
    only: tuple[str, ...] | None = None  # tools that the agent gets; null: all
    start_seconds: PositiveFloat = 30.0  # until it has answered for the first time

    @model_validator(mode="after")
    def _one_way(self) -> McpServer:
        if bool(self.command) == bool(self.url):
            raise ValueError("a server has either a command or a url")
        if self.url and self.environment:
            raise ValueError("environment is for a command; a url has headers")
        if self.command and self.headers:
            raise ValueError("headers are for a url; a command has environment")
        if self.url and not _is_plain(self.url):
            raise ValueError(
                "url must begin with http:// or https:// and hold no user or password: name an "
                "environment variable in headers"
            )
        return self

    @property
    def variables(self) -> list[str]:
        """Return the names of all environment variables that the server gets."""
        return [*self.environment, *self.headers.values()]


class McpTools(Frozen):
    """The tools of MCP servers."""

    servers: Annotated[Mapping[Name, McpServer], Field(min_length=1)]
    seconds: PositiveFloat  # of one call, connecting again included
    attempts: Positive = 3  # connections that a call tries
    characters: Positive  # of a result; a longer one is cut


def _is_plain(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc


def setting_faults(settings: McpTools, source: str) -> list[str]:
    """Return what cannot work on this machine: a missing program, a variable that is not set.

    A replay reaches no server and needs neither.
    """
    faults: list[str] = []
    if replay_folder():
        return faults
    for name, server in settings.servers.items():
        if server.command and not shutil.which(server.command[0]):
            faults.append(
                f"servers.{name}.command: the program '{server.command[0]}' is not found: install "
                "it, or write its path"
            )
        faults += [
            f"servers.{name}: the environment variable {variable} is not set: set it before the run"
            for variable in server.variables
            if not os.environ.get(variable)
        ]
    return faults


def secrets_of(servers: Iterable[McpServer]) -> dict[str, str]:
    """Return the values of the named variables, longest first, with what is shown instead.

    Each value is there as JSON writes it, too, and as it is without "Bearer" or another scheme.
    """
    names = {variable for server in servers for variable in server.variables}
    written = {
        form: f"[{name}]"
        for name in sorted(names)
        for value in [os.environ.get(name, "").strip(), *_without_scheme(os.environ.get(name, ""))]
        for form in (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
        if len(value) >= SHORTEST_SECRET
    }
    return {form: written[form] for form in sorted(written, key=len, reverse=True)}


def _without_scheme(value: str) -> list[str]:
    scheme, *others = value.split() or [""]
    return others if len(others) == 1 and scheme.isalpha() else []


def plain_name(name: str) -> str:
    """Return the name of a tool in the characters that a call of it may have."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def without_secrets(text: str, secrets: Mapping[str, str]) -> str:
    """Return a text with the names of secrets in place of their values."""
    for secret, name in secrets.items():
        text = text.replace(secret, name)
    return text


def shown(text: str, secrets: Mapping[str, str]) -> str:
    """Return a text of a server that is safe to show: cut it afterwards, not before.

    Secrets are replaced before and after what cannot be seen is left out, which may be in them.
    """
    return without_secrets(safe(without_secrets(text, secrets)), secrets)

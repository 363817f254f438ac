"""Worlds of an OpenEnv server (0.10), by its address.

The messages are JSON over a WebSocket, each answered by one: ``{"type": "reset", "data": {"seed":
...}}``, ``{"type": "step", "data": <action>}``, ``{"type": "close"}``. An observation is
``{"type": "observation", "data": {"observation": {...}, "reward": ..., "done": ...}}``.

A connection is one episode: where it breaks, the server has forgotten the episode. A new one is
then reset with the seed and given the same actions. If what it answers is the same, the agent goes
on and notices nothing; if not, or if the server does not come back, the episode fails.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any
from urllib.parse import urlsplit

import jsonschema
from pydantic import StringConstraints, model_validator
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

from params.schema.addresses import is_loopback
from params.schema.base import Frozen, Positive, PositiveFloat
from tasks.environments.contract import FREE_TEXT, EnvironmentKind
from tasks.tools.recording import replay_folder
from tasks.trees.outcomes import FAILURES_TO_BLAME, Outcome, UnavailableError
from tasks.trees.tree import Call, Observation, Question, ToolSpec

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]+$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

PAUSE = 0.2  # seconds before the second attempt to connect; doubles
SHARE = 0.9  # of the seconds of an act are used here, so that its process need not be ended
LARGEST = 2**24  # bytes of a message
TOO_BIG = 1009  # what a WebSocket says of a message that is larger
SHORTEST_SECRET = 4  # characters; a shorter value is no secret, and would be found everywhere
OWN_ENTRIES = ("metadata", "done", "reward")  # of an observation, not shown to the agent


class _SlowError(Exception):
    """The server did not answer within the time limit."""


class _NoRoomError(ConnectionError):
    """The server has no room for an episode, or could not make it."""


class Tool(Frozen):
    """One act: what the agent is told of it. ``parameters`` is a JSON schema of type "object"."""

    name: Name
    description: str
    parameters: Mapping[str, Any]


class ServerAction(Frozen):
    """How a call becomes the server's action, a JSON object."""

    text: str | None = None  # the entry that holds the agent's text, where it has no tools
    name: str | None = None  # the entry that holds the tool's name; null: none
    arguments: str | None = None  # the entry that holds all parameters; null: each is an entry
    fixed: Mapping[str, Any] = {}  # entries of every action


class OpenEnv(Frozen):
    """An OpenEnv server, and how its actions and observations look to the agent."""

    url: str  # http://, https://, ws:// or wss://
    task: str  # what the agent is told before the first observation
    action: ServerAction
    tools: tuple[Tool, ...] = ()  # none: the agent acts in free text
    reset: Mapping[str, Any] = {}  # parameters of every reset; the seed is added
    text_field: str | None = None  # of an observation, such as "board.text"; null: its JSON
    actions_field: str | None = None  # holds the list of admissible acts; null: none
    headers: Mapping[str, Variable] = {}  # header -> the environment variable with its value
    seconds: PositiveFloat = 60.0  # of one act, connecting again included
    attempts: Positive = 7  # to connect, with pauses of 0.2, 0.4, 0.8, ... seconds

    @model_validator(mode="after")
    def _fits(self) -> OpenEnv:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https", "ws", "wss") or "@" in parts.netloc:
            raise ValueError(
                f"url {self.url} must begin with http://, https://, ws:// or wss:// and hold no "
                "user or password: name an environment variable in headers"
            )
        if not self.tools and not self.action.text:
            raise ValueError(
                "without tools, action.text must name the entry of the action that holds the "
                "agent's text"
            )
        return self


def tool_specs(settings: OpenEnv) -> list[ToolSpec]:
    """Return the acts as the agent is told of them."""
    if not settings.tools:
        return [FREE_TEXT]
    return [ToolSpec(one.name, one.description, one.parameters) for one in settings.tools]


def setting_faults(settings: OpenEnv) -> list[str]:
    """Return what cannot work: a schema that is none, a variable that is not set.

    A replay reaches no server and needs no variable.
    """
    faults = []
    for tool in settings.tools:
        try:
            jsonschema.Draft202012Validator.check_schema(dict(tool.parameters))
        except jsonschema.SchemaError as error:
            faults.append(f"tools, {tool.name}: parameters is no JSON schema: {error.message}")
        if tool.parameters.get("type") != "object":
            faults.append(f"tools, {tool.name}: parameters must have the type object")
    return faults + [
        f"headers.{header}: the environment variable {variable} is not set: set it before the run"
        for header, variable in settings.headers.items()
        if not os.environ.get(variable) and not replay_folder()
    ]


def numbered_tasks(settings: OpenEnv, split: str, count: int, seed: int) -> list[Question]:
    """Return tasks that differ in their seed alone; equal ``seed`` gives equal tasks."""
    seeds = random.Random(f"{seed} {split}").sample(range(2**31), count)
    return [
        Question(
            f"{split}-{number}", "openenv", settings.task, (), data=json.dumps({"seed": task_seed})
        )
        for number, task_seed in enumerate(seeds)
    ]


class OpenEnvWorld:
    """One episode on the server. Its data may have a "row": more parameters of the reset."""

    def __init__(self, settings: OpenEnv | Mapping[str, Any]) -> None:
        self._settings = OpenEnv.model_validate(settings)
        self.tools: Sequence[ToolSpec] = tool_specs(self._settings)
        self._connection: ClientConnection | None = None
        self._until = 0.0  # on the clock: the end of the time for an answer
        self._said: list[tuple[dict[str, Any], Any]] = []  # messages of this episode, with answers

    def start(self, task: Question, seed: int) -> Observation:
        """Reset the server's episode. Raises UnavailableError, TimeoutError or ValueError."""
        row = json.loads(task.data).get("row") or {} if task.data else {}
        data = {**self._settings.reset, **row, "seed": seed}
        answer = self._asked({"type": "reset", "data": data})
        if answer["type"] != "observation":
            raise ValueError(f"the server refused to reset: {_message(answer)}")
        return self._observation(answer)

    def act(self, call: Call) -> Observation:
        """Do one step. An action that the server refuses is an observation that says why.

        Raises UnavailableError where the server is away.
        """
        answer = self._asked({"type": "step", "data": self._action(call)})
        if answer["type"] == "observation":
            return self._observation(answer)
        invalid = answer["data"].get("code") == "VALIDATION_ERROR"
        return Observation(Outcome.BAD_ARGUMENTS if invalid else Outcome.ERROR, _message(answer))

    def close(self) -> None:
        """End the episode on the server."""
        if self._connection:
            with suppress(OSError, WebSocketException):
                self._connection.send(json.dumps({"type": "close"}))
            self._connection.close()
            self._connection = None

    def _action(self, call: Call) -> dict[str, Any]:
        how, values = self._settings.action, dict(call.values)
        if not self._settings.tools:
            values = {str(how.text): values["text"]}
        named = {how.name: call.tool} if how.name else {}
        # The recipe's own entries last: no parameter of the agent's replaces them.
        return {**({how.arguments: values} if how.arguments else values), **how.fixed, **named}

    def _observation(self, answer: Mapping[str, Any]) -> Observation:
        data = answer["data"]
        seen, reward = data.get("observation"), data.get("reward")
        if not isinstance(seen, dict) or not isinstance(reward, int | float | None):
            raise ValueError(f"the server's observation has another form: {_short(data)}")
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"the server's reward is {reward}")
        actions = _field(seen, self._settings.actions_field) if self._settings.actions_field else ()
        return Observation(
            Outcome.OK,
            _text(seen, self._settings.text_field),
            reward=float(reward or 0),
            terminated=bool(data.get("done")),
            actions=tuple(map(_written, actions)),
        )

    # ------------------------------------------------------------ messages

    def _asked(self, message: dict[str, Any]) -> Any:
        """Send a message and return its answer; on a new connection, repeat the episode first."""
        self._until = time.monotonic() + SHARE * self._settings.seconds
        broke = 0  # how often the connection broke while this message was answered
        for attempt in range(self._settings.attempts):
            if attempt:
                time.sleep(PAUSE * 2 ** (attempt - 1))
            reached = False
            try:
                if self._connection is None:
                    self._connection = self._connected()
                    self._repeat()
                reached = True
                answer = self._exchanged(message)
                self._said.append((message, answer))
                return answer
            except _SlowError as error:  # it may be as slow again
                self._drop(error)
                raise TimeoutError(str(error)) from error
            except (OSError, WebSocketException) as error:
                self._drop(error)
                broke += reached and not isinstance(error, _NoRoomError)
                reason = f"{type(error).__name__}: {error}"
        kind = ConnectionError if broke >= FAILURES_TO_BLAME else UnavailableError
        raise kind(f"{self._settings.url} cannot be reached: {reason}")

    def _repeat(self) -> None:
        """Give the server the messages of this episode again.

        Raises UnavailableError if it differs.
        """
        for number, (message, before) in enumerate(self._said):
            if _compared(self._exchanged(message)) != _compared(before):
                raise UnavailableError(
                    f"the server came back and answered message {number + 1} of the episode, a "
                    f"{message['type']}, differently: it does not keep to its seed"
                )

    def _connected(self) -> ClientConnection:
        parts = urlsplit(self._settings.url)
        address = parts._replace(
            scheme={"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme),
            path=parts.path.rstrip("/").removesuffix("/ws") + "/ws",
        )
        return connect(
            address.geturl(),
            additional_headers={
                name: os.environ.get(variable, "")
                for name, variable in self._settings.headers.items()
            },
            open_timeout=self._left(),
            close_timeout=1,
            max_size=LARGEST,
            proxy=None if is_loopback(self._settings.url) else True,
        )

    def _exchanged(self, message: dict[str, Any]) -> Any:
        """Send one message and wait for its answer.

        Raises _NoRoomError where the server has no room, ValueError for an answer of another
        form.
        """
        assert self._connection
        with suppress(ConnectionClosed):  # what the server said before is still to be read
            self._connection.send(_clean(json.dumps(message, ensure_ascii=False)))
        try:
            text = self._connection.recv(timeout=self._left())
        except TimeoutError as error:
            raise _SlowError(f"the server did not answer a {message['type']} in time") from error
        try:
            answer = json.loads(self._without_secrets(text))
        except RecursionError:
            raise ValueError("the server's answer is nested too deeply") from None
        known = isinstance(answer, dict) and answer.get("type") in ("observation", "error")
        if not known or not isinstance(answer.get("data"), dict):
            raise ValueError(f"the server's answer has another form: {_short(answer)}")
        if answer["data"].get("code") in ("CAPACITY_REACHED", "SESSION_ERROR", "FACTORY_ERROR"):
            raise _NoRoomError(_message(answer))
        return answer

    def _without_secrets(self, text: str | bytes) -> str:
        """Return what the server said with the name of a header in place of its value.

        What an agent sees is stored, and trees are committed.
        """
        said = text.decode(errors="replace") if isinstance(text, bytes) else text
        for header, variable in self._settings.headers.items():
            secret = os.environ.get(variable, "").strip()
            if len(secret) >= SHORTEST_SECRET:
                quoted = (json.dumps(secret, ensure_ascii=ascii) for ascii in (True, False))
                for written in (secret, *(text[1:-1] for text in quoted)):
                    said = said.replace(written, f"[{header}]")
        return said

    def _left(self) -> float:
        """Return the seconds that are left for the answer. Raises _SlowError if there are none."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise _SlowError("the server was away too long")
        return left

    def _drop(self, error: Exception) -> None:
        """Forget a connection that has failed. Raises ValueError for an answer that is too long."""
        if self._connection:
            with suppress(OSError, WebSocketException):
                self._connection.close()
        self._connection = None
        if isinstance(error, ConnectionClosed) and error.sent and error.sent.code == TOO_BIG:
            raise ValueError(f"the server's answer has more than {LARGEST} bytes") from error


# ---------------------------------------------------------------- observations


def _text(seen: dict[str, Any], name: str | None) -> str:
    shown = {key: value for key, value in seen.items() if key not in OWN_ENTRIES}
    return _written(_field(seen, name) if name else shown)


def _field(seen: Any, name: str) -> Any:
    """Return an entry of an observation by its path. Raises ValueError where it is missing."""
    entry = seen
    for key in name.split("."):
        if not isinstance(entry, dict) or key not in entry:
            raise ValueError(f"the observation has no entry {name}: {_short(seen)}")
        entry = entry[key]
    return entry


def _written(value: Any) -> str:
    return _clean(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _clean(text: str) -> str:
    return text.encode(errors="replace").decode()  # lone surrogates become question marks


def _compared(answer: Any) -> Any:
    """Return the part of an answer that a replay must repeat."""
    data = answer["data"]
    seen = data.get("observation")
    shown = {k: v for k, v in seen.items() if k != "metadata"} if isinstance(seen, dict) else seen
    return answer["type"], data.get("reward"), data.get("done"), data.get("message"), shown


def _message(answer: Mapping[str, Any]) -> str:
    data = answer["data"]
    whys = [str(error.get("msg", "")) for error in data.get("errors", ())]
    return _clean(": ".join([str(data.get("message", "")), *whys[:3]]))


def _short(value: Any) -> str:
    return _written(value)[:200]


ENVIRONMENT = EnvironmentKind(
    settings=OpenEnv,
    world="tasks/environments/openenv.py:OpenEnvWorld",
    specs=tool_specs,
    tasks=numbered_tasks,
    faults=setting_faults,
    repeatable=False,
)

"""What an agent is: ``dialogue``, ``dialect``, ``tools``, ``environment`` and ``engine``."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    Strict,
    model_serializer,
    model_validator,
)

from params.schema.addresses import check_servers, servers_here
from params.schema.base import Frozen, Machine, NonNegative, Positive, PositiveFloat

Sections = dict[str, SerializeAsAny[Frozen]]  # name -> settings


def _day_of(written: Any) -> Any:
    """Return the day that a text such as 2026-01-31 names; anything else as it is."""
    if not isinstance(written, str):
        return written
    try:
        return datetime.datetime.strptime(written, "%Y-%m-%d").date()
    except ValueError:
        raise ValueError(f'{written!r} is no day: write one as in "2026-01-31"') from None


Day = Annotated[datetime.date, BeforeValidator(_day_of), Strict()]


class Dialogue(Frozen):
    """The section ``dialogue``: the agent's system message and the limits of a trajectory."""

    system: str  # system message; "": none
    date: Day = datetime.date(2026, 1, 1)  # what the clock of a chat template shows, at midnight
    turn_tokens: Positive  # most sampled tokens per turn
    result_tokens: Positive  # most tokens of one tool result; a longer one is cut
    # most tokens after the prompt, sampled and observed; prompts of single steps do not count
    response_tokens: Positive
    tool_calls: NonNegative  # most tool calls, or acts in an environment, per trajectory
    # growing: one dialogue; fresh: each step of an environment has a prompt of its own, with the
    # task, the last ``history`` steps, the observation and the admissible actions
    prompt: Literal["growing", "fresh"] = "growing"
    history: NonNegative = 2
    prompt_tokens: Positive | None = None  # most tokens of a fresh prompt

    @model_validator(mode="after")
    def _fresh_prompts_are_limited(self) -> Dialogue:
        if (self.prompt == "fresh") != (self.prompt_tokens is not None):
            raise ValueError(
                f"prompt is {self.prompt} and prompt_tokens is {self.prompt_tokens}: give "
                "prompt_tokens, the most tokens of one prompt, with fresh prompts and only there"
            )
        return self

    @property
    def path_tokens(self) -> int:
        """Return the most tokens of a path after its first prompt, later prompts included."""
        return self.response_tokens + self.tool_calls * (self.prompt_tokens or 0)


class EngineSettings(Frozen):
    """The section ``engine``: what samples.

    ``kind`` decides the result and enters keys, and so does that transformers samples on servers.
    """

    kind: Literal["transformers", "vllm"]
    # vLLM's memory for weights, keys and values: a share of the GPU's; on a CPU, the GiB of keys
    # and values.
    memory: Annotated[PositiveFloat, Field(exclude=True)]
    # Addresses of servers of that kind; []: sample on this machine.
    servers: Annotated[tuple[str, ...], Field(exclude=True)] = ()
    # Groups of questions that vLLM or servers sample independently, so that none waits for the
    # tools of another one. With 1, all questions go on in common rounds.
    lanes: Annotated[Positive, Field(exclude=True)] = 1

    @model_validator(mode="after")
    def _servers_are_named_once(self) -> EngineSettings:
        try:
            check_servers(self.servers)
        except ValueError as error:
            raise ValueError(f"servers: {error}") from None
        return self

    @model_serializer(mode="wrap")
    def _what_decides(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return what enters keys.

        A transformers server samples each tree in a batch of its own, of which the last bits are.
        """
        by_tree = self.kind == "transformers" and self.addresses
        return fields(self) | ({"batches": "trees"} if by_tree else {})

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the servers that sample: those of BEAMLINE_SERVERS, else the recipe's.

        A run goes on with servers at other addresses, so they are no part of its recipe. Raises
        ValueError for a variable with something else in it.
        """
        return servers_here() or self.servers


class Agent(Frozen):
    """Everything that decides how an agent acts; verbs that sample take it as one input."""

    dialogue: Dialogue
    # name -> settings; tasks/recipes checks them against the files that are named
    tools: Sections
    environment: Sections  # at most one; none: single questions with tools
    program: Sections = Field(default_factory=dict)  # at most one, which is the agent then
    dialect: Sections  # exactly one
    sources: dict[str, str]  # name -> digest of the source that the name stands for
    engine: EngineSettings
    machine: Machine

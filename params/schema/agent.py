"""What an agent is: its dialogue, its tools, and the engine that samples it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
    SerializeAsAny,
    model_validator,
)

from params.schema.base import (
    Frozen,
    Machine,
    NonNegative,
    Positive,
    PositiveFloat,
)


class Dialogue(Frozen):
    """How an agent's trajectory is laid out, and where it is cut."""

    system: str
    turn_tokens: Positive  # sampled tokens a turn, at most
    result_tokens: Positive  # tokens of one tool result, at most
    response_tokens: Positive  # tokens after the prompt, sampled and observed, at most
    tool_calls: NonNegative  # a trajectory, at most


class Engine(Frozen):
    """What samples. Only its kind decides what comes out, and is in keys of the ledger."""

    kind: Literal["transformers", "vllm"]
    # Of vllm: what it may take for weights and for keys and values. On a GPU a share of its memory,
    # on a CPU the GiB of keys and values.
    memory: Annotated[PositiveFloat, Field(exclude=True)]
    # of vllm, elsewhere; null: here
    server: Annotated[str | None, Field(exclude=True, pattern="^https?://")]
    # Of vllm: groups of questions that go on by themselves, so that none waits for another's tools.
    # With 1 all go in rounds.
    lanes: Annotated[Positive, Field(exclude=True)]

    @model_validator(mode="after")
    def _only_vllm_has_a_server(self) -> Engine:
        if self.server and self.kind != "vllm":
            raise ValueError(
                f"server is {self.server} and kind {self.kind}, which samples here: set server to "
                "null, or kind to vllm"
            )
        return self


class Agent(Frozen):
    """All that decides how an agent acts: how its dialogue is laid out, its tools, what samples."""

    dialogue: Dialogue
    tools: dict[str, SerializeAsAny[Frozen]]  # name -> its settings
    engine: Engine
    machine: Machine

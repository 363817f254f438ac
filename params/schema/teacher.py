"""The section ``teacher``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from params.schema.base import Frozen, NonNegative, Positive, PositiveFloat
from params.schema.chat import ChatBudget, ChatLimits, Endpoint


class RunTeacher(Frozen):
    """The policy that a run has trained: its commit, and the digest of models/<recipe>/trained."""

    kind: Literal["run"]
    recipe: str
    commit: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{32}\.dir$")]


class PretrainedTeacher(Frozen):
    """A policy from the Hugging Face hub, from a local folder, or from a GGUF file."""

    kind: Literal["pretrained"]
    name: str  # name on the hub, or path of a folder; with gguf, also a Python package
    revision: str | None  # commit on the hub; null: a folder
    gguf: Annotated[str, Field(pattern=r"^[\w.-]+\.gguf$")] | None = None  # the file in it


class ServerTeacher(Endpoint, ChatLimits):
    """A model behind a server that returns the log-probabilities of the tokens it is sent.

    The server knows OpenAI's /completions with ``echo``, as vLLM's does, and may change under its
    name: what it has answered is kept with the run.
    """

    kind: Literal["server"]
    concurrency: Annotated[Positive, Field(exclude=True)] = 8
    timeout_seconds: Annotated[PositiveFloat, Field(exclude=True)] = 120.0
    retries: Annotated[NonNegative, Field(exclude=True)] = 5
    budget: Annotated[ChatBudget, Field(exclude=True)] = ChatBudget()


Teacher = Annotated[RunTeacher | PretrainedTeacher | ServerTeacher, Field(discriminator="kind")]

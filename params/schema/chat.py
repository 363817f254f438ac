"""Models that are asked in messages: where they are, and how often they may be asked."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from params.schema.addresses import check_endpoint, check_key_travels_safely
from params.schema.base import Frozen, NonNegative, Positive, PositiveFloat


class Endpoint(Frozen):
    """A model behind an OpenAI-compatible server.

    Its name identifies it: the address can change, and what was answered before still counts. So
    only the name is in keys of the ledger and of the cache.
    """

    # up to the part before /chat/completions, such as http://127.0.0.1:8000/v1
    url: Annotated[str, AfterValidator(check_endpoint), Field(exclude=True)]
    name: Annotated[str, Field(min_length=1)]  # of the model, as the server knows it
    # environment variable with the API key; null: the server needs none
    key_variable: Annotated[str | None, Field(exclude=True)] = None

    @model_validator(mode="after")
    def _key_travels_safely(self) -> Self:
        check_key_travels_safely(self.url, self.key_variable)
        return self


class ChatEndpoint(Endpoint):
    """A model that answers messages."""

    kind: Literal["endpoint"]


class ChatBudget(Frozen):
    """What may be spent in all, restarts included; null: any amount. Cached answers are free."""

    calls: Positive | None = None  # requests that were sent
    tokens: Positive | None = None  # of prompts and answers


class ChatLimits(Frozen):
    """How a server is asked. It decides no result, so it is in no key."""

    concurrency: Annotated[Positive, Field(exclude=True)]  # requests of a model side by side
    timeout_seconds: Annotated[PositiveFloat, Field(exclude=True)]  # of one attempt
    retries: Annotated[NonNegative, Field(exclude=True)]  # attempts after the first one
    budget: Annotated[ChatBudget, Field(exclude=True)]

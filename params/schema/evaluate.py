"""The section ``evaluate``."""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    Field,
)

from params.schema.base import Frozen, Positive, PositiveFloat


class Evaluate(Frozen):
    questions: Positive  # of the test set, at most
    temperature: PositiveFloat
    top_p: Annotated[float, Field(gt=0, le=1)]
    bootstrap: Positive  # resamples

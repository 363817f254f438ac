"""The section ``evaluate``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from params.schema.base import Float, Frozen, Positive, PositiveFloat


class Evaluate(Frozen):
    """The evaluation on the test split: one answer per question."""

    questions: Positive  # most questions of the test split
    temperature: PositiveFloat
    top_p: Annotated[Float, Field(gt=0, le=1)]  # nucleus sampling
    bootstrap: Positive  # resamples

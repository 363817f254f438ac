"""The section ``verdict``."""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    Field,
)

from params.schema.base import Frozen, Positive


class Verdict(Frozen):
    """When a candidate takes the champion's place."""

    # A paired bootstrap of success over the held-out questions: the two-sided interval of
    # candidate - champion must lie above the margin.
    confidence: Annotated[float, Field(gt=0, lt=1)]
    margin: Annotated[float, Field(ge=-1, le=1)]  # of success, a share
    bootstrap: Positive  # resamples

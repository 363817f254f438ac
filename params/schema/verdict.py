"""The section ``verdict``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from params.schema.base import Float, Frozen, Positive


class Verdict(Frozen):
    """When a candidate replaces the champion.

    The test is a paired bootstrap of the measure on the held-out questions. The whole two-sided
    interval of candidate - champion must lie above the margin.
    """

    # share of right answers, or mean of graded scores
    measure: Literal["success", "score"] = "success"
    confidence: Annotated[Float, Field(gt=0, lt=1)]  # of the interval
    margin: Annotated[Float, Field(ge=-1, le=1)]  # difference of the measure
    bootstrap: Positive  # resamples

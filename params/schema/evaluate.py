"""The section ``evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from params.schema.base import Float, Frozen, Positive, PositiveFloat, check_below_sources


class Evaluate(Frozen):
    """The evaluation on the test split."""

    # file of the tasks of another run; null: this recipe's own test split
    panel: Path | None = None
    questions: Positive  # most tasks of the panel
    samples: Positive = 1  # answers a question; several give pass@k, pass^k and maj@k
    temperature: PositiveFloat
    top_p: Annotated[Float, Field(gt=0, le=1)]  # nucleus sampling
    bootstrap: Positive  # resamples
    # verified: each question's own scorer; papers: a judge, but for the knowledge sets
    protocol: Literal["verified", "papers"] = "verified"

    @model_validator(mode="after")
    def _panel_is_watched(self) -> Evaluate:
        if self.panel:
            check_below_sources(self.panel)
        return self

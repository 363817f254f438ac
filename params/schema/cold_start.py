"""The section ``cold_start``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from params.schema.base import Float, Frozen, NonNegative, Positive, PositiveFloat


class ColdStart(Frozen):
    """Supervised fine-tuning (SFT) of the first policy on the expert's traces."""

    steps: Positive  # optimizer steps
    batch: Positive  # traces per step
    micro_batch: Positive  # traces per forward pass
    learning_rate: PositiveFloat  # peak
    warmup_steps: NonNegative
    weight_decay: Annotated[Float, Field(ge=0)]
    save_every: Positive  # steps between checkpoints

    @model_validator(mode="after")
    def _micro_batches_fill_a_batch(self) -> ColdStart:
        if self.batch % self.micro_batch:
            raise ValueError(
                f"batch {self.batch} is not a multiple of micro_batch {self.micro_batch}: change "
                "one of them"
            )
        return self

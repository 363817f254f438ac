"""What all sections share: number types, the frozen base class, ``machine``, and folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict

PARAMS = Path(__file__).parents[1]
SOURCES = Path("data/sources")  # the user's own files; DVC watches it

# Strict: true is no number, and '5' is a text; an integer is a float, too.
Integer = Annotated[int, Strict()]
Float = Annotated[float, Strict()]
Flag = Annotated[bool, Strict()]
Positive = Annotated[Integer, Field(gt=0)]
NonNegative = Annotated[Integer, Field(ge=0)]
PositiveFloat = Annotated[Float, Field(gt=0)]
Probability = Annotated[Float, Field(ge=0, le=1)]


class Frozen(BaseModel):
    """Base class of every section: immutable; unknown keys, NaN and infinity are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Machine(Frozen):
    """The section ``machine``: what a run may use of the machine that it runs on."""

    threads: Positive  # of torch; also the number of warm sandboxes
    device: Literal["cpu", "cuda"]
    precision: Literal["float32", "bfloat16"]  # of forward passes; master weights are float32
    processes: Positive = 1  # that learn side by side
    # Limit for the recipe's files on the disk, in GiB; null: none. It decides no result, so it is
    # in no key.
    disk_gib: Annotated[PositiveFloat | None, Field(exclude=True)] = None


def check_below_sources(file: Path) -> None:
    """Raise ValueError for a user's file outside data/sources/, the folder that DVC watches."""
    if file.is_absolute() or ".." in file.parts or not file.is_relative_to(SOURCES):
        raise ValueError(
            f"{file} is outside the folder {SOURCES}/, so DVC would not notice when it changes: "
            "move it there"
        )

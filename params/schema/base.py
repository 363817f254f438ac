"""What every section shares: number types, the frozen base, ``machine``, and reading YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
)

PARAMS = Path(__file__).parents[1]
SOURCES = Path("data/sources")  # the user's own files; DVC watches it
TABLES = ("algorithms", "architectures", "benchmarks")  # files of params/ that are no recipes

Positive = Annotated[int, Field(gt=0)]
Operand = Annotated[int, Field(ge=2)]  # operands are drawn from 2 on
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(ge=0, le=1)]


class Frozen(BaseModel):
    """Base of every section: immutable, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Section = TypeVar("Section", bound=Frozen)


class Machine(Frozen):
    """What the run may use of the machine it is on."""

    threads: Positive  # of torch, and warm sandboxes side by side
    device: Literal["cpu", "cuda"]
    precision: Literal["float32", "bfloat16"]  # of passes; master weights are float32 always
    # What the recipe's files may take of the disk, at most; it decides no outcome and is in no key.
    disk_gib: Annotated[PositiveFloat | None, Field(exclude=True)] = None


Reference = Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]  # set/split of benchmarks.yaml


def check_below_sources(file: Path) -> None:
    """Raise ValueError for a user's file that is not below data/sources/, which DVC watches."""
    if file.is_absolute() or ".." in file.parts or not file.is_relative_to(SOURCES):
        raise ValueError(
            f"{file} lies outside the folder {SOURCES}/, so DVC would not notice a change of it: "
            "move it there"
        )


def read_yaml(file: Path) -> Any:
    """Parse a YAML file; a syntax error names file and line."""
    try:
        return yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not YAML: {error}") from None


def validate(model: type[Section], values: Any, where: str) -> Section:
    """Turn parsed YAML into a section; every fault in one ValueError, a line each."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = [_explain(fault) for fault in error.errors()]
        raise ValueError("\n".join(f"{where}: {line}" for line in lines)) from None


SEVERAL_KINDS = (["prepare", "policy"], ["prepare", "questions"], ["prepare", "expert"])


def _explain(fault: Any) -> str:
    path = [str(part) for part in fault["loc"]]
    for section in (*SEVERAL_KINDS, ["estimator"]):
        if path[: len(section)] == section:
            del path[len(section) : len(section) + 1]  # pydantic adds the kind
    key = ".".join(path)
    remedies = {
        "extra_forbidden": f"unknown key '{key}': remove it, or correct its spelling",
        "missing": f"missing key '{key}': add it (the files of params/ explain every key)",
    }
    where = (
        f"'{key}' = {fault['input']!r}: " if key and not isinstance(fault["input"], dict) else ""
    )
    return remedies.get(fault["type"], f"{where}{fault['msg'].removeprefix('Value error, ')}")

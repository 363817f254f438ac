"""Rows of params/architectures.yaml: shapes of models on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    Field,
)

from params.schema.base import PARAMS, Frozen, read_yaml, validate


class Architecture(Frozen):
    """A row of params/architectures.yaml: the shape of a model on the Hugging Face hub."""

    revision: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]  # the commit that has this shape
    config: dict[str, Any]  # of its config.json what decides memory and time


def load_architectures(folder: Path = PARAMS) -> dict[str, Architecture]:
    """The rows of ``<folder>/architectures.yaml`` by the model's name; ValueError as ``load``."""
    file = folder / "architectures.yaml"
    rows = read_yaml(file) if file.is_file() else {}
    if not isinstance(rows, dict):
        raise ValueError(f"{file} holds no rows: it needs a revision and a config for each name")
    return {name: validate(Architecture, row, f"{file}: {name}") for name, row in rows.items()}

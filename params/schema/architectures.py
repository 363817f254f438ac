"""Rows of params/architectures.yaml: the shapes of models on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from params.schema.base import PARAMS, Frozen
from params.schema.reading import read_table


class Architecture(Frozen):
    """A row of params/architectures.yaml: the shape of one model."""

    revision: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]  # the commit with this config.json
    config: dict[str, Any]  # the entries of config.json that decide memory and time


def load_architectures(folder: Path = PARAMS) -> dict[str, Architecture]:
    """Return the rows of ``<folder>/architectures.yaml`` by model name; {} without the file.

    Raises ValueError with file, row, key and remedy.
    """
    file = folder / "architectures.yaml"
    return read_table(file, Architecture) if file.is_file() else {}

"""Rows of params/benchmarks.yaml: sets of questions and how their records are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    Field,
)

from params.schema.base import PARAMS, Frozen, read_yaml, validate


class Hub(Frozen):
    """Files of a dataset on the Hugging Face hub, at one commit."""

    name: str
    revision: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]  # a commit: branches move
    files: dict[str, str]  # split -> file in the dataset's repository


class Benchmark(Frozen):
    """A row of params/benchmarks.yaml: where a set of questions lies, and how to read a record.

    A field is a dotted path into the record ("prompt.0.content"); numbers are places in a list.
    """

    hub: Hub | None  # null: only files below data/sources/<set>/
    question: str  # field: a text, or a chat (a list of role and content)
    answer: str  # field: a text, a number, or a list of accepted forms
    answer_after: str | None  # the answer is what follows the last of these marks, such as "####"
    solution: str | None  # field of a worked solution
    records: str | None  # in a JSON file that is no list: the field of the list
    scorer: Literal["exact", "maths", "f1"]


def benchmark_of(reference: str, sets: Mapping[str, Benchmark]) -> Benchmark:
    """How the records of a set, or of a reference (set/split), are read.

    ValueError for a set without a row.
    """
    name = reference.partition("/")[0]
    if name not in sets:
        raise ValueError(
            f"{reference} of prepare: params/benchmarks.yaml has no row '{name}': choose "
            f"one of {sorted(sets)}, or add a row"
        )
    return sets[name]


def load_benchmarks(folder: Path = PARAMS) -> dict[str, Benchmark]:
    """The rows of ``<folder>/benchmarks.yaml`` by name; ValueError as ``load``."""
    file = folder / "benchmarks.yaml"
    rows = read_yaml(file) if file.is_file() else None
    if not isinstance(rows, dict):
        raise ValueError(
            f"{file} is missing or holds no rows: it needs a name and keys for each set"
        )
    return {name: validate(Benchmark, row, f"{file}: {name}") for name, row in rows.items()}

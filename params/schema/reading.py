"""Read YAML files into sections; every fault names file, key, value and remedy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from params.schema.base import Frozen

Section = TypeVar("Section", bound=Frozen)


def read_yaml(file: Path) -> Any:
    """Parse a YAML file. Raises ValueError with file and line for a syntax error."""
    try:
        return yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from None


def read_table(file: Path, model: type[Section]) -> dict[str, Section]:
    """Read a file of named rows. Raises ValueError with file, row, key and remedy."""
    rows = read_yaml(file) if file.is_file() else None
    if not isinstance(rows, dict):
        needed = ", ".join(_key(name, field.alias) for name, field in model.model_fields.items())
        raise ValueError(
            f"{file} is missing or has no rows: write each row as a name with the keys {needed}"
        )
    return {name: validate(model, row, f"{file}, row {name}") for name, row in rows.items()}


def validate(model: type[Section], values: Any, where: str) -> Section:
    """Turn parsed YAML into a section. Raises one ValueError for all faults, one line each."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        unions = list(_unions(model))
        lines = [_explain(fault, unions) for fault in error.errors()]
        raise ValueError("\n".join(f"{where}: {line}" for line in lines)) from None


def _unions(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each key that holds one of several kinds of section."""
    for name, field in model.model_fields.items():
        here = (*path, _key(name, field.alias))
        if field.discriminator:
            yield here
            continue
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _unions(kind, here)


def _key(name: str, alias: str | None) -> str:
    """Return how a field is written in YAML."""
    return alias or name


def _explain(fault: Any, unions: list[tuple[str, ...]]) -> str:
    """Return one fault that pydantic found as a line with key, value and remedy."""
    path = [str(part) for part in fault["loc"]]
    for union in unions:
        if tuple(path[: len(union)]) == union:
            del path[len(union) : len(union) + 1]  # pydantic puts the kind after the union's key
    key = ".".join(path)
    remedies = {
        "extra_forbidden": f"unknown key '{key}': remove it, or correct its spelling",
        "missing": f"missing key '{key}': add it (comments in params/*.yaml explain each key)",
    }
    value = "" if isinstance(fault["input"], dict) else f" = {fault['input']!r}"
    where = f"'{key}'{value}: " if key else ""
    return remedies.get(fault["type"], f"{where}{fault['msg'].removeprefix('Value error, ')}")

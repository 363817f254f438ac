"""Read YAML files into sections; every fault names file, key, value and remedy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from params import strict_yaml, suggestions
from params.schema.base import Frozen

Section = TypeVar("Section", bound=Frozen)

SHOWN = 200  # characters of a value in a message
HOW_TO_WRITE = {  # by pydantic's type of fault
    "int_type": "write digits alone, such as 3",
    "float_type": "write a decimal number, such as 0.5 or 2e-3",
    "bool_type": "write true or false",
    "string_type": "put it in quotes",
}
# Keys without a default that recipes of earlier versions lack: what happened without them.
HAPPENED_BEFORE = {
    "dialect": "{tags: {}}",
    "engine": "{kind: transformers, memory: 1.0}",
    "environment.household.held_out": "0.5",
    "reward_model.scored": "all",
}


def read_table(file: Path, model: type[Section]) -> dict[str, Section]:
    """Read a file of named rows. Raises ValueError with file, row, key and remedy."""
    rows = strict_yaml.read(file) if file.exists() else None
    if not isinstance(rows, dict):
        needed = ", ".join(_key(name, field.alias) for name, field in model.model_fields.items())
        raise ValueError(
            f"{file} is missing or has no rows: write each row as a name with the keys {needed}"
        )
    sections: dict[str, Section] = {}
    faults = []
    for name, row in rows.items():
        try:
            sections[name] = validate(model, row, f"{file}, row {name}")
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))
    return sections


def validate(model: type[Section], values: Any, where: str, at: tuple[str, ...] = ()) -> Section:
    """Turn parsed YAML into a section. Raises one ValueError for all faults, one line each.

    ``at``: the key of the section in the file, part by part; () where the file is the section.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        unions = list(_unions(model))
        keys = [".".join([*at, *path]) for path in _keys(model)]
        lines = [_explain(fault, unions, at, keys) for fault in error.errors()]
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


def _keys(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each key of a section and of the sections in it, of all their kinds."""
    for name, field in model.model_fields.items():
        here = (*path, _key(name, field.alias))
        yield here
        for kind in _sections(field.annotation):
            yield from _keys(kind, here)


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a type may stand for: itself, or those of a union."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    together = get_origin(annotation) in (Union, UnionType)
    kinds = get_args(annotation) if together else (annotation,)
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _key(name: str, alias: str | None) -> str:
    """Return how a field is written in YAML."""
    return alias or name


def _explain(
    fault: Any, unions: list[tuple[str, ...]], at: tuple[str, ...], keys: list[str]
) -> str:
    """Return one fault that pydantic found as a line with key, value and remedy."""
    path = [str(part) for part in fault["loc"]]
    for union in unions:
        if tuple(path[: len(union)]) == union:
            del path[len(union) : len(union) + 1]  # pydantic puts the kind after the union's key
    key = ".".join([*at, *path])
    known = [other for other in keys if other != key]  # it may be one of another kind of section
    remedies = {
        "extra_forbidden": f"unknown key '{key}': remove it, or correct its spelling"
        + suggestions.meant_key(key, known),
        "missing": f"missing key '{key}': add it (comments in params/*.yaml explain each key)"
        + _before(key),
    }
    value = "" if isinstance(fault["input"], dict) else f" = {_shown(fault['input'])}"
    where = f"'{key}'{value}: " if key else ""
    how = f": {HOW_TO_WRITE[fault['type']]}" if fault["type"] in HOW_TO_WRITE else ""
    message = f"{where}{fault['msg'].removeprefix('Value error, ')}{how}"
    return remedies.get(fault["type"], message)


def _before(key: str) -> str:
    """Return how a recipe writes what happened before there was a key; "" for most keys."""
    if key not in HAPPENED_BEFORE:
        return ""
    name = key.rpartition(".")[2]
    return f"; '{name}: {HAPPENED_BEFORE[key]}' is what happened before there was the key"


def _shown(value: Any) -> str:
    written = repr(value)
    return written if len(written) <= SHOWN else f"{written[:SHOWN]}..."

"""Which keys a recipe may leave out, and the value that stands for each of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_args, get_origin

from pydantic_core import to_jsonable_python

from params.schema.base import Frozen
from params.schema.recipe import Recipe

ENTRY = "*"  # in a key: any entry of a list


@functools.cache
def defaults() -> Mapping[str, Any]:
    """Return the value of each key that may be left out, as a recipe would write it.

    Keys are paths such as "evaluate.samples"; in "judge.models.*.key_variable", * is the number of
    an entry of a list.
    """
    return MappingProxyType(dict(_defaults(Recipe, "")))


def in_defaults(path: Sequence[str]) -> str:
    """Return how ``defaults`` names a key, given part by part with the numbers of entries."""
    return ".".join(ENTRY if part.isdigit() else part for part in path)


def _defaults(section: type[Frozen], above: str) -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        key = f"{above}{field.alias or name}"
        if not field.is_required():
            value = to_jsonable_python(field.get_default(call_default_factory=True))
            yield key, None if value == {} else value  # a section by names: recipes write null
        for inner, path in _sections(field.annotation, key):
            yield from _defaults(inner, f"{path}.")


def _sections(kind: Any, path: str) -> Iterator[tuple[type[Frozen], str]]:
    """Yield the sections that a type allows, each with the path of its keys."""
    if isinstance(kind, type) and issubclass(kind, Frozen):
        yield kind, path
    for inner in get_args(kind):
        yield from _sections(inner, f"{path}.{ENTRY}" if get_origin(kind) is tuple else path)

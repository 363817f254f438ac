"""Merge the values of a recipe into those of its base.

Mappings merge key by key; everything else is replaced whole. A policy, questions or an expert of
another kind have other keys, so they are replaced whole, too, and so are sections in which one name
stands at most, where that is another one. null takes a named entry away, and has a key that may be
left out at its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from params.schema.defaults import defaults, in_defaults
from params.whole_file import BASE

Path = tuple[str, ...]  # of a key: ("reinforce", "update", "learning_rate")

KINDS: dict[Path, str] = {  # section -> its key that decides which others it has
    ("prepare", "policy"): "kind",
    ("prepare", "questions"): "source",
    ("prepare", "expert"): "kind",
}
NAMED = ("tools", "environment", "program", "dialect")  # sections with entries by name
ONE_NAME = ("environment", "program", "dialect")  # of these, sections with one entry at most
OF_ITS_RUNS = ("champion", "expect")  # what holds for the runs of the base alone
BESIDE: dict[Path, tuple[str, ...]] = {  # key -> those beside it that it says more of
    ("prepare", "policy", "origin"): ("name", "gguf"),
}


class Way(Enum):
    """How a value gets into its base's."""

    MERGED = "key by key"
    SET = "in its place"
    UNSET = "taken away"


def merge(base: Mapping[str, Any], own: Mapping[str, Any], above: Path = ()) -> dict[str, Any]:
    """Return the values that hold, the base's keys first, in their order."""
    merged = {key: value for key, value in base.items() if not is_dropped(key, value, own, above)}
    for key, value in own.items():
        path = (*above, key)
        way = way_of(path, base.get(key), value, key in base)
        if way is Way.UNSET:
            merged.pop(key, None)
        elif way is Way.MERGED:
            merged[key] = merge(base[key], value, path)
        elif path != (BASE,):
            merged[key] = whole(path, value)
    return merged


def is_dropped(key: str, value: Any, own: Mapping[str, Any], above: Path) -> bool:
    """Return whether a recipe does not take this key over from its base."""
    if key in own or value is None:
        return False
    of_others = any(other in own for other in BESIDE.get((*above, key), ()))
    return of_others or (not above and key in OF_ITS_RUNS)


def way_of(path: Path, base: Any, own: Any, is_there: bool) -> Way:
    """Return how ``own`` at a path gets into what is there in the base, if anything is."""
    has_default = defaults().get(in_defaults(path)) is not None  # null is null where it is so
    if own is None and is_there and (_is_entry(path) or has_default):
        return Way.UNSET
    if isinstance(base, Mapping) and base and isinstance(own, Mapping) and own:
        return Way.SET if _is_another(path, base, own) else Way.MERGED
    return Way.SET


def whole(path: Path, value: Any) -> Any:
    """Return a value that stands in its base's place, without the names that it takes away."""
    if path[-1] in ONE_NAME and len(path) == 1 and isinstance(value, Mapping):
        return {name: settings for name, settings in value.items() if settings is not None} or value
    return value


def _is_entry(path: Path) -> bool:
    return len(path) == 2 and path[0] in NAMED


def _is_another(path: Path, base: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Return whether a section is of another kind than its base's, with other keys."""
    if len(path) == 1 and path[0] in ONE_NAME:
        return any(settings is not None and name not in base for name, settings in own.items())
    kind = KINDS.get(path, "")
    return kind in own and own[kind] != base.get(kind)

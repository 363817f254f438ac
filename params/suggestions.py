"""Suggest the name that somebody may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

LIKE = 0.5  # least likeness of two names, of 1: "tyni" and "tiny"
ALIKE = 0.7  # of two keys, of which there are many
MOST = 3  # places of a key that are named


def nearest(name: str, known: Iterable[str], like: float = LIKE) -> str | None:
    """Return the known name that is most like ``name``, or None where none is like it."""
    every = {each.casefold(): each for each in known}
    matches = difflib.get_close_matches(name.casefold(), every, n=1, cutoff=like)
    return every[matches[0]] if matches else None


def meant(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for an error about ``name``; "" where nothing is like it."""
    suggestion = nearest(name, known)
    return _asked([suggestion] if suggestion else [])


def meant_key(key: str, known: Collection[str]) -> str:
    """Return `` (did you mean 'a.b'?)`` for an unknown key; "" where nothing is like it.

    ``known``: the keys that there are, with their sections ("reinforce.rollout.temperature"). A key
    of the same section that is written much alike comes first, then the same key elsewhere, then
    keys elsewhere that are written much alike.
    """
    section, _, name = key.rpartition(".")
    places: dict[str, list[str]] = {}
    for path in dict.fromkeys(known):
        places.setdefault(path.rpartition(".")[2], []).append(path)
    beside = [last for last, paths in places.items() if _joined(section, last) in paths]
    if close := nearest(name, beside, ALIKE):
        return _asked([_joined(section, close)])
    elsewhere = nearest(name, places, ALIKE)
    return _asked(sorted(places[elsewhere], key=_depth)[:MOST] if elsewhere else [])


def _joined(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _depth(path: str) -> int:
    return path.count(".")


def _asked(names: list[str]) -> str:
    *others, last = [f"'{name}'" for name in names] or [""]
    listed = f"{', '.join(others)} or {last}" if others else last
    return f" (did you mean {listed}?)" if names else ""

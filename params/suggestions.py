"""Suggest the name that somebody may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LIKE = 0.5  # least likeness of two names, of 1: "tyni" and "tiny"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like ``name``, or None where none is like it."""
    every = {each.casefold(): each for each in known}
    matches = difflib.get_close_matches(name.casefold(), every, n=1, cutoff=LIKE)
    return every[matches[0]] if matches else None


def meant(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for an error about ``name``; "" where nothing is like it."""
    suggestion = nearest(name, known)
    return f"; did you mean '{suggestion}'?" if suggestion else ""

"""Compare an answer with the accepted forms of the gold answer as text."""

from __future__ import annotations

import re
from collections.abc import Sequence

_INTEGER = re.compile(r"[+-]?(\d+|\d{1,3}(,\d{3})+)")  # with or without thousands separators


def exact_match(answer: str, accepted: Sequence[str]) -> dict[str, float]:
    """Score 1 if the answer equals an accepted form, else 0.

    Forms are compared without surrounding space, case, thousands separators and a final full stop;
    two integers are compared as numbers, so "+7" and "007" equal "7".
    """
    plain = _plain(answer)
    return {"score": float(any(plain == _plain(form) for form in accepted))}


def _plain(text: str) -> str:
    """Return the text in the form that is compared."""
    text = text.strip().rstrip(".").casefold()
    if not _INTEGER.fullmatch(text):
        return text
    sign = "-" if text.startswith("-") else ""
    digits = text.lstrip("+-").replace(",", "").lstrip("0")
    return sign + digits if digits else "0"

"""Whether an answer is one of the accepted forms of the gold answer."""

from __future__ import annotations

from collections.abc import Sequence


def exact_match(answer: str, accepted: Sequence[str]) -> float:
    """1 if the answer equals an accepted form, else 0.

    Forms are compared without surrounding space, case, thousands separators and a final full stop;
    two integers are compared as numbers, so "+7" and "007" equal "7".
    """
    return float(any(_plain(answer) == _plain(form) for form in accepted))


def _plain(text: str) -> str:
    text = text.strip().rstrip(".").casefold()
    digits = text.replace(",", "").replace("_", "")
    try:
        return str(int(digits))
    except ValueError:
        return text

"""Compare an answer with the accepted forms of the gold answer as text, number or list.

The rules are those of GAIA's scorer (2311.12983): a gold number is compared as a number, without
"$", "%" and thousands separators; a gold list, with commas or semicolons, element by element; other
text without spaces and punctuation. Our additions: numbers are exact; compatibility forms of
Unicode are unified; LaTeX around words is taken off; signs and punctuation inside numbers count, as
do "+", "#" and other symbols.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import regex

from tasks.scorers.contract import ScorerKind
from tasks.scorers.plain import number, unified, unmarked

_SEPARATOR = regex.compile(r"[,;]")
_JOINED = regex.compile(r"(?<=\d)\s*([-/:])\s*(?=\d)")  # 3 / 4
_MIXED = regex.compile(r"(?<=\d)\s+(?=\d+\s*/\s*\d)")  # 5 1/2, which is not 51/2
_DATE = regex.compile(r"\b(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})\b")
_UNITS = regex.compile(r"[$%]")
_MEANS_NOTHING = regex.compile(
    r"\s|(?!(?<=\d)\p{P}(?=\d))(?!(?<![^\s(\[])-(?=\.?\d))(?!(?<=\p{L})\#)[\p{P}`]"
)


def exact_match(answer: str, accepted: Sequence[str]) -> dict[str, float]:
    """Score 1 if the answer equals an accepted form as a number, a list or a text, else 0."""
    plain = _stripped(answer)
    return {"score": float(any(_same(plain, _stripped(form)) for form in accepted))}


def _stripped(text: str) -> str:
    """Return a unified text without surrounding space and a final full stop."""
    return unified(unmarked(text)).strip().rstrip(".\u3002").strip()


def _same(answer: str, gold: str) -> bool:
    """Return whether a stripped answer equals a stripped gold answer."""
    if not gold:  # a gold answer of punctuation alone says nothing, and nothing equals it
        return False
    if answer == gold:
        return True
    value = _number(gold)
    if value is not None:
        return _number(answer) == value
    if _SEPARATOR.search(gold):
        ours, theirs = (_SEPARATOR.split(text) for text in (answer, gold))
        return len(ours) == len(theirs) and all(map(_same_element, ours, theirs))
    plain = _without_marks(gold)
    return bool(plain) and _without_marks(answer) == plain


def _without_marks(text: str) -> str:
    """Drop spaces and the punctuation that means nothing.

    Dates are written with hyphens, and the parts of a mixed number with a plus.
    """
    text = _DATE.sub(r"\1-\2-\3", _JOINED.sub(r"\1", _MIXED.sub("+", text)))
    return _MEANS_NOTHING.sub("", text)


def _same_element(answer: str, gold: str) -> bool:
    """Compare two elements of a list, whose punctuation counts."""
    value = _number(gold)
    if value is not None:
        return _number(answer) == value
    return "".join(answer.split()) == "".join(gold.split())


def _number(text: str) -> Fraction | None:
    """Return the value of a number with "$", "%" or surrounding space, or None."""
    return number(_UNITS.sub("", text).strip())


SCORER = ScorerKind(exact_match, lenient=True)

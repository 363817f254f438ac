r"""Find an accepted answer anywhere in a turn: the lenient score, beside the strict one.

A model often knows the answer and writes it otherwise than it was asked to: "84." for
``<answer>\boxed{84}</answer>``. Here an answer counts where it stands as a whole number or word,
normalised as the scorers do: 1,234 is 1234, 84.0 is 84, and 8 is in no 84. A fraction (12/4) is
one number, and no value is computed: an exercise that is repeated holds no result.

What it is fooled by, and what is done about it: a turn that tries many numbers has the right one
among them, so one with more than ``MOST_NUMBERS`` different ones counts as wrong; so does one with
both yes and no. A single letter stands anywhere by chance, so options have no lenient score. What
remains is an intermediate result, or a number of the question, that happens to equal the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from operator import add

import regex

from tasks.scorers import plain
from tasks.scorers.f1 import tokens
from tasks.scorers.numerals import without_groups
from tasks.scorers.plain import unified, unmarked

MOST_NUMBERS = 12  # different ones in a turn; the solution of a word problem has fewer
COLUMNS = ("lenient", "last_number")
VERDICTS = {"yes": "no", "no": "yes"}  # a word, and the one that contradicts it

_DIGITS = r"(?:\d{1,3}(?:,\d{3}){1,12}|\d{1,40})(?!\d)(?:\.\d{1,40}(?!\d))?|\.\d{1,40}(?!\d)"
_FRACTION = (
    r"(?P<above>\d{1,40})\s?/\s?(?P<below>\d{1,40})(?!\d)"
    r"|\\[dt]?frac\{(?P<over>\d{1,40})\}\{(?P<under>\d{1,40})\}"
)
_NUMBERS = regex.compile(
    r"(?<![\w^_]|[\d.,:/]\.?)(?P<sign>(?<!\w|[\d)\]}]\s?)-\s?)?\$?"
    rf"(?:{_FRACTION}|(?P<plain>{_DIGITS}))(?![\w^]|[.,:/]\d)"
)
_MARKUP = regex.compile(r"</?\w+>|\\\w+|[{}$*|\"()\[\]]")  # around words
_UNITS = regex.compile(r"[$%]")
_FORMULA = regex.compile(r"[\\^_={}+*/<>|]")
_PARTS = regex.compile(r"\w+|[^\w\s]")
_BEFORE = r"(?<![\w.\\]|[+\-*/^]\s?)"  # of a formula that stands alone
_AFTER = r"(?!\w|\.\d|\s?[+\-*/^(])"


def scores(turn: str, accepted: Sequence[str], right: bool) -> dict[str, bool | None]:
    """Return both lenient scores of a turn by their column; None for one that says nothing.

    ``right``: the scorer calls the answer right, in whatever form it was found.
    """
    found = {
        "lenient": stands_in(turn, accepted),
        "last_number": last_number_is(turn, accepted),
    }
    return {name: None if one is None else one or right for name, one in found.items()}


def stands_in(turn: str, accepted: Sequence[str]) -> bool | None:
    """Return whether an accepted form stands in a turn; None where that says nothing.

    That is so where every form is a single letter or has neither letter nor digit.
    """
    forms = [form for form in accepted if _is_telling(form)]
    if not forms:
        return None
    text = _plain(turn)
    return any(_stands(text, form) for form in forms)


def last_number_is(turn: str, accepted: Sequence[str]) -> bool | None:
    """Return whether the last number of a turn is the answer; None where no form is a number."""
    values = [value for form in accepted if (value := _value(form)) is not None]
    last = [*_numbers(_plain(turn))][-1:]
    return last[0] in values if values and last else (False if values else None)


def _plain(text: str) -> str:
    """Return a text whose numbers have no sign between thousands but commas."""
    return without_groups(text.replace("{,}", ","))


def _is_telling(form: str) -> bool:
    """Return whether a form is more than a single letter, or signs alone."""
    words = [word for word in _words(form) if any(map(str.isalnum, word))]
    if _FORMULA.search(unmarked(form)):
        return bool(words)
    return any(len(word) > 1 or not ("a" <= word <= "z") for word in words)


def _stands(text: str, form: str) -> bool:
    if (value := _value(form)) is not None:
        found = {*_numbers(text)}
        return value in found and len(found) <= MOST_NUMBERS
    if _FORMULA.search(unmarked(form)):
        return bool(_formula(form).search(unified(text)))
    words, wanted = _words(text), _words(form)
    against = VERDICTS.get(wanted[0]) if len(wanted) == 1 else None
    return _contains(words, wanted) and against not in words


def _words(text: str) -> list[str]:
    return tokens(_MARKUP.sub(" ", unmarked(text)))


def _contains(words: Sequence[str], wanted: Sequence[str]) -> bool:
    """Return whether some words stand among others, one after the other."""
    size = len(wanted)
    return any(words[start : start + size] == wanted for start in range(len(words) - size + 1))


def _formula(form: str) -> regex.Pattern[str]:
    """Return what finds a formula that stands alone, with any space around its signs."""
    parts = _PARTS.findall(unified(unmarked(form)))
    apart = [one[-1].isalnum() and two[0].isalnum() for one, two in pairwise(parts)]
    gaps = [r"\s+" if words else r"\s*" for words in apart]
    written = map(add, map(regex.escape, parts), [*gaps, ""])
    return regex.compile(f"{_BEFORE}{''.join(written)}{_AFTER}")


def _value(form: str) -> Fraction | None:
    """Return the value of an accepted form that is a number, or None."""
    text = _UNITS.sub("", unified(_plain(unmarked(form)))).strip().rstrip(".")
    if (value := plain.number(text)) is not None:
        return value
    matched = _NUMBERS.fullmatch(text)
    return _value_of(matched) if matched else None


def _numbers(text: str) -> Iterator[Fraction]:
    """Yield the values of the whole numbers, decimals and fractions in a text, in their order."""
    for matched in _NUMBERS.finditer(unified(text)):
        if (value := _value_of(matched)) is not None:
            yield value


def _value_of(matched: regex.Match[str]) -> Fraction | None:
    """Return the value of a number; None for a fraction that is an exercise, such as 12/4."""
    if matched["plain"]:
        value = Fraction(matched["plain"].replace(",", ""))
    else:
        above, below = matched["above"] or matched["over"], matched["below"] or matched["under"]
        if not int(below) or not int(above) % int(below):
            return None
        value = Fraction(int(above), int(below))
    return -value if matched["sign"] else value

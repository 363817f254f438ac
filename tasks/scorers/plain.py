"""Bring texts into one form before they are compared, and read plain numbers."""

from __future__ import annotations

import unicodedata
from fractions import Fraction

import regex

from tasks.trees.words import compatible

POINTS = str.maketrans({"\u066b": ".", "\u066c": ","})  # of Arabic numbers
DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63\uff0d", "-"))
INVISIBLE = regex.compile(r"[\p{Cf}\u00ad\ufe0e\ufe0f\u00ae\u00a9\u2122]")  # and (R), (C), TM
_RAISED = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
_POWER = regex.compile(rf"(?<=\d)(?=[{_RAISED}])")
_MIXED = regex.compile(r"(?<=\d)(?=[\u00bc-\u00be\u2150-\u215e])")  # a fraction after a number
_TEXT_COMMAND = regex.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|math(?:rm|bf|it|sf|tt)|mbox|emph|operatorname)"
    r"\s*\{([^{}]*)\}"
)
_SPACING = regex.compile(r"\\[ ,;:]")
_ESCAPED = regex.compile(r"\\([%$&#_])")
_AROUND = regex.compile(  # a whole answer: $...$, \(...\), **...**
    r"\$([^$]+)(?<!\\)\$|\\\(((?:(?!\\\().)+)\\\)|\*\*([^*]+)\*\*", regex.DOTALL
)
_NUMBER = regex.compile(
    r"(?P<sign>[+-]?)(?P<digits>\d+|\d{1,3}(?:,\d{3})+|\d{1,3}(?:[ _]\d{3})+)?"
    r"(?:\.(?P<decimals>\d*))?(?:e(?P<exponent>[+-]?\d{1,3}))?"
)


def unified(text: str) -> str:
    """Return the text without case, in compatibility form (NFKC), with one kind of dash and digits.

    A raised digit after a number becomes a power, and a fraction after one stays apart from it:
    10\u00b2 is not 102, and 5\u00bd is not 51/2.
    """
    text = _MIXED.sub(" ", _POWER.sub("^", INVISIBLE.sub("", text))).translate(POINTS)
    text = compatible(text).replace("\u2044", "/").translate(DASHES)
    text = text.casefold()
    return "".join(_ascii_digit(sign) for sign in text) if not text.isascii() else text


def unmarked(text: str) -> str:
    r"""Return a text without the LaTeX and Markdown that agents put around words in a box.

    ``\text{Lisbon}``, ``$\mathrm{Lisbon}$`` and ``**Lisbon**`` are Lisbon, and ``50\%`` is 50%.
    """
    if not any(mark in text for mark in ("\\", "$", "**")):
        return text
    plain, before = text, None
    while plain != before:
        before, plain = plain, _TEXT_COMMAND.sub(r"\1", plain.strip())
        if matched := _AROUND.fullmatch(plain):
            plain = matched[1] or matched[2] or matched[3]
    return _ESCAPED.sub(r"\1", _SPACING.sub(" ", plain)) or text


def _ascii_digit(sign: str) -> str:
    return str(unicodedata.decimal(sign)) if unicodedata.category(sign) == "Nd" else sign


def number(text: str) -> Fraction | None:
    """Return the value of a unified text that is a plain number, or None.

    Signs, thousands separators, decimals and exponents are read: "+7", "-1,234.50", "12 000",
    "1e3".
    """
    matched = _NUMBER.fullmatch(text)
    if not matched or not (matched["digits"] or matched["decimals"]):
        return None
    digits = regex.sub("[, _]", "", matched["digits"] or "0")
    value = Fraction(f"{matched['sign']}{digits}.{matched['decimals'] or '0'}")
    return value * Fraction(10) ** int(matched["exponent"] or 0)

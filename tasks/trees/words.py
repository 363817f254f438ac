"""Compare texts word by word, and escape text that is not printable."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

# Scripts that put no space between words, for a character class of the package ``regex``.
UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"

INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")  # soft hyphen, zero-width characters
APOSTROPHES = re.compile("['`\u2018\u2019\u2032]")
SIGNS = str.maketrans(  # one way to write each
    dict.fromkeys("\u00d7\u22c5\u00b7", "*")
    | dict.fromkeys("\u00f7\u2044", "/")
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-")
)
LATEX = (  # commands that change only the layout, and the usual synonyms
    (re.compile(r"\\[()\[\]]"), " "),
    (re.compile(r"\\(?:left|right|bigg?[lr]?|text|textbf|mathrm|mbox|displaystyle)(?![a-z])"), " "),
    (re.compile(r"\\[dt]frac(?![a-z])"), " frac "),
    (re.compile(r"\\(?:times|cdot)(?![a-z])"), "*"),
    (re.compile(r"\\div(?![a-z])"), "/"),
)
# Written without spaces between words: Chinese and Japanese.
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
LETTERS = rf"[^\W\d_{CJK}]"
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # 1,000 is one number
WORD = re.compile(
    rf"{LETTERS}+|\d+(?:\.\d+)?|[{CJK}()+*=<>^%]"
    rf"|(?<!{LETTERS})[-/](?!{LETTERS})"  # next to a letter, a hyphen or an "or"
)


def overlaps(texts: Sequence[str], held_out: Sequence[str], words: int) -> list[int | None]:
    """Return for each text the index of the first held-out text that it overlaps, or None.

    Two texts overlap if they are equal after normalisation or share ``words`` words in a row; a
    text of fewer words is compared as a whole. Time and memory grow with the number of words.
    Raises ValueError for fewer than one word.
    """
    if words < 1:
        raise ValueError(f"words is {words}: at least 1 word must be shared to overlap")
    first: dict[tuple[str, ...], int] = {}
    for index, text in enumerate(held_out):
        for run in _runs(text, words):
            first.setdefault(run, index)
    return [
        min((first[run] for run in _runs(text, words) if run in first), default=None)
        for text in texts
    ]


def normalised_words(text: str) -> list[str]:
    """Return the words of a text without case, punctuation and LaTeX layout commands.

    A number with its decimals is one word; so is a mathematical sign, and each character of
    Chinese and Japanese. A text that has only other symbols is one word.
    """
    text = text.casefold()
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text).casefold().translate(SIGNS)
        text = INVISIBLE.sub("", text)
    if "\\" in text:
        for pattern, word in LATEX:
            text = pattern.sub(word, text)
    text = THOUSANDS.sub("", APOSTROPHES.sub("", text))
    return WORD.findall(text) or [text.strip()]


def _runs(text: str, words: int) -> Iterator[tuple[str, ...]]:
    """Yield every run of ``words`` words in a row; the whole text if it has fewer."""
    found = tuple(normalised_words(text))
    return (found[start : start + words] for start in range(max(1, len(found) - words + 1)))


def printable(text: str) -> str:
    """Replace characters that a page or terminal might act on by escapes such as "\\x07".

    Line feeds and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() or sign in "\n\t" else sign.encode("unicode_escape").decode()
        for sign in text
    )

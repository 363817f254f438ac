"""Compare texts word by word, and escape text that is not printable."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

Run = tuple[str, ...]  # consecutive words of a text
MOST_SHARED = 20  # held-out texts with the same run that are looked at

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
_CHARACTER = re.compile(f"[{CJK}]")
LETTERS = rf"[^\W\d_{CJK}]"
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # 1,000 is one number
WORD = re.compile(
    rf"{LETTERS}+|\d+(?:\.\d+)?|[{CJK}()+*=<>^%]"
    rf"|(?<!{LETTERS})[-/](?!{LETTERS})"  # next to a letter, a hyphen or an "or"
)


def overlaps(texts: Sequence[str], held_out: Sequence[str], words: int) -> list[int | None]:
    """Return for each text the index of the first held-out text that it overlaps, or None.

    Two texts overlap if they are equal after normalisation, or share runs of ``words`` words that
    make up at least half of one of them; a text of fewer words is compared as a whole. So a phrase
    that many problems begin with is no overlap of long ones. A character of Chinese or Japanese
    counts as half a word. Time and memory grow with the number of words; of the held-out texts that
    share a run, the first ``MOST_SHARED`` are compared. Raises ValueError for fewer than one word.
    """
    if words < 1:
        raise ValueError(f"words is {words}: at least 1 word must be shared to overlap")
    others = [_Text.of(text, words) for text in held_out]
    places: dict[Run, list[int]] = {}
    for index, other in enumerate(others):
        for run in other.runs:
            known = places.setdefault(run, [])
            if len(known) < MOST_SHARED:
                known.append(index)
    found = []
    for text in texts:
        own = _Text.of(text, words)
        shared = {index for run in own.runs for index in places.get(run, ())}
        found.append(next((i for i in sorted(shared) if _overlap(own, others[i])), None))
    return found


def shared_phrase(text: str, other: str, words: int) -> str:
    """Return the longest run of words that two overlapping texts share, normalised."""
    own, runs = _Text.of(text, words), _Text.of(other, words).runs
    longest = (0, 0)
    begin = until = 0  # of the stretch of shared runs that overlap or touch
    for start, end, run in own.spans:
        if run not in runs:
            continue
        begin, until = (begin if start <= until else start), end
        longest = max(longest, (begin, until), key=lambda stretch: stretch[1] - stretch[0])
    return " ".join(own.words[slice(*longest)])


@dataclass(frozen=True)
class _Text:
    """The words of a text, and its runs with their places."""

    words: Sequence[str]
    spans: Sequence[tuple[int, int, Run]]  # start, end, and the words between them
    runs: frozenset[Run]

    @classmethod
    def of(cls, text: str, words: int) -> _Text:
        own = normalised_words(text)
        spans = [(start, end, tuple(own[start:end])) for start, end in _spans(own, words)]
        return cls(own, spans, frozenset(run for _, _, run in spans))


def _overlap(own: _Text, other: _Text) -> bool:
    """Return whether the runs that two texts share make up at least half of one of them."""
    shared = own.runs & other.runs
    return any(2 * _covered(text, shared) >= len(text.words) for text in (own, other))


def _covered(text: _Text, runs: Collection[Run]) -> int:
    """Return the number of words that are part of one of the runs."""
    covered = until = 0
    for start, end, run in text.spans:
        if run in runs:
            covered += end - max(start, until)
            until = end
    return covered


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


def _spans(text: Sequence[str], words: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of every shortest run that weighs as much as ``words`` words."""
    weights = [1 if _CHARACTER.match(word) else 2 for word in text]
    if sum(weights) < 2 * words:
        yield 0, len(text)
        return
    end = weight = 0
    for start in range(len(text)):
        while weight < 2 * words:
            if end == len(text):
                return
            weight += weights[end]
            end += 1
        yield start, end
        weight -= weights[start]


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

"""Compare texts word by word, and make texts of others safe to show: to agents, and to people."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import regex
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tasks.trees.tree import Message

Run = tuple[str, ...]  # consecutive words of a text
MOST_SHARED = 20  # held-out texts with the same run that are looked at
MOST_COMPARED = 4096  # held-out texts whose words are kept at once
PORTION = 1024  # texts whose words are kept at once
BASE = 0x9E3779B97F4A7C15  # of the hashes of runs, odd
INVERSE = pow(BASE, -1, 2**64)
DIGEST_BYTES = 16
MOST_MARKS = (
    30  # combining marks in a row, as in Unicode's stream-safe format; no language has more
)
# The two halfwidth signs become marks when they are normalised.
_MARK = r"[\p{M}\uff9e\uff9f]"
_MORE_MARKS = regex.compile(rf"({_MARK}{{{MOST_MARKS}}}){_MARK}+")

# Scripts that put no space between words, for a character class of the package ``regex``.
UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"

INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")  # soft hyphen, zero-width characters
APOSTROPHES = re.compile("['`\u2018\u2019\u2032]")
SIGNS = str.maketrans(  # one way to write each
    dict.fromkeys("\u00d7\u22c5\u00b7", "*")
    | dict.fromkeys("\u00f7\u2044", "/")
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-")
)
# What a text must not do to a terminal or a reader; it is replaced by the value. Marks that letters
# and emoji need stay: joiners (Persian, families of emoji) and signs of the direction's own script.
UNSAFE = {
    "\ufffd": r"\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff",  # halves of characters, and none
    "\n": r"\u2028\u2029",  # separators of lines and paragraphs
    " ": r"\x00-\x08\x0b-\x1f\x7f-\x9f\u2800",  # controls, those of C1 included; an empty Braille
    # invisible: order of writing, zero width, fillers of scripts, annotations, tags, unused marks
    "": r"\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u202a-\u202e"
    r"\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb"
    r"\U0001bca0-\U0001bca3\U0001d159\U0001d173-\U0001d17a\U000e0000-\U000e00ff"
    r"\U000e01f0-\U000e0fff",
}
# Selectors choose a form of the character before them; joiners stand between two. More of them in a
# row can spell a hidden text.
SELECTORS = r"\u180b-\u180d\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef"
JOINERS = r"\u200c\u200d"
UNSAFE_PATTERNS = [
    *((re.compile(f"[{signs}]"), instead) for instead, signs in UNSAFE.items()),
    (re.compile(rf"(?<=[{JOINERS}])[{JOINERS}{SELECTORS}]+"), ""),
    (re.compile(rf"(?:(?<=[{SELECTORS}])|(?<=\s)|\A)[{SELECTORS}]+"), ""),
]
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


def overlaps(texts: Iterable[str], held_out: Sequence[str], words: int) -> list[int | None]:
    """Return for each text the index of the first held-out text that it overlaps, or None.

    Two texts overlap if they are equal after normalisation, or share runs of ``words`` words that
    make up at least half of one of them; a text of fewer words is compared as a whole. So a phrase
    that many problems begin with is no overlap of long ones. A character of Chinese or Japanese
    counts as half a word. Time grows with the number of words, memory with that of the held-out
    texts: runs are compared by hashes, and what seems to be shared once more word by word. Of the
    held-out texts that share a run, the first ``MOST_SHARED`` are compared. Raises ValueError for
    fewer than one word.
    """
    if words < 1:
        raise ValueError(f"words is {words}: at least 1 word must be shared to overlap")
    known: dict[str, int] = {}  # held-out word -> number, from 1 on
    hashes, owners = [np.zeros(0, np.uint64)], [np.zeros(0, np.int32)]
    for first, portion in _portions(held_out):
        texts_of_words = [normalised_words(text) for text in portion]
        for words_of_text in texts_of_words:
            for word in words_of_text:
                known.setdefault(word, len(known) + 1)
        hashes_N, owners_N = _run_hashes(texts_of_words, known, words)
        hashes.append(hashes_N)
        owners.append(owners_N + first)
    held = _Runs.of(np.concatenate(hashes), np.concatenate(owners))
    other = lru_cache(MOST_COMPARED)(lambda index: _Text.of(held_out[index], words))
    first_overlaps: list[int | None] = []
    for _, portion in _portions(texts):
        texts_of_words = [normalised_words(text) for text in portion]
        shared = held.sharing(*_run_hashes(texts_of_words, known, words))
        for index, text in enumerate(portion):
            if index not in shared:
                first_overlaps.append(None)
                continue
            whole = _Text.of(text, words)
            first_overlaps.append(
                next((i for i in shared[index] if _overlap(whole, other(i))), None)
            )
    return first_overlaps


def _portions(texts: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield ``PORTION`` texts at a time, with the index of the first of them."""
    remaining, first = iter(texts), 0
    while portion := list(islice(remaining, PORTION)):
        yield first, portion
        first += len(portion)


@dataclass(frozen=True)
class _Runs:
    """Hashes of the runs of held-out texts in their order, each with the texts that have it."""

    hashes: NDArray[np.uint64]  # [N]
    owners: NDArray[np.int32]  # [N]

    @classmethod
    def of(cls, hashes_N: NDArray[np.uint64], owners_N: NDArray[np.int32]) -> _Runs:
        order = np.lexsort((owners_N, hashes_N))
        hashes_N, owners_N = hashes_N[order], owners_N[order]
        new_N = np.ones(len(order), bool)
        new_N[1:] = (np.diff(hashes_N) != 0) | (np.diff(owners_N) != 0)
        return cls(hashes_N[new_N], owners_N[new_N])

    def sharing(
        self, hashes_N: NDArray[np.uint64], owners_N: NDArray[np.int32]
    ) -> dict[int, list[int]]:
        """Return for each text that shares a run the held-out texts that have one, in order."""
        starts_N = np.searchsorted(self.hashes, hashes_N)
        ends_N = np.searchsorted(self.hashes, hashes_N, side="right")
        shared: dict[int, set[int]] = {}
        for hit in np.flatnonzero(starts_N < ends_N):
            start = starts_N[hit]
            end = min(ends_N[hit], start + MOST_SHARED)
            shared.setdefault(int(owners_N[hit]), set()).update(self.owners[start:end].tolist())
        return {owner: sorted(others) for owner, others in shared.items()}


def _run_hashes(
    texts: Sequence[Sequence[str]], known: Mapping[str, int], words: int
) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Return a hash of each run of the texts' words, and the index of the run's text. [N]

    Equal runs of ``known`` words have equal hashes; the others get hashes of no such run. The hash
    of a run that starts at word s is the sum of hash(word) * BASE^(place - s), modulo 2^64.
    """
    counts = [len(text) for text in texts]
    ends = np.cumsum([0, *counts])  # of the texts, among all words
    numbers = np.fromiter((known.get(w, 0) for text in texts for w in text), np.uint64, ends[-1])
    weights = np.full(ends[-1], 2)
    for index, text in enumerate(texts):
        if not all(map(str.isascii, text)):
            weights[ends[index] : ends[index + 1]] = [_weight(word) for word in text]
    total = np.cumsum([0, *weights.tolist()])
    owners = np.repeat(np.arange(len(texts), dtype=np.int32), counts)
    starts = np.arange(ends[-1])
    stops = np.searchsorted(total, total[:-1] + 2 * words)
    light = total[ends[1:]] - total[ends[:-1]] < 2 * words  # texts that are compared as a whole
    whole = np.zeros(ends[-1], bool)
    whole[ends[:-1][light]] = True
    stops = np.where(whole, ends[1:][owners], stops)
    mask = whole | ((stops <= ends[1:][owners]) & ~light[owners])
    starts, stops = starts[mask], stops[mask]
    powers, inverses = (_powers(base, ends[-1]) for base in (BASE, INVERSE))
    sums = np.zeros(ends[-1] + 1, np.uint64)
    np.cumsum(_mixed(numbers) * powers[:-1], out=sums[1:])
    return (sums[stops] - sums[starts]) * inverses[starts], owners[mask]


def _powers(base: int, most: int) -> NDArray[np.uint64]:
    """Return the powers 0 to ``most`` of a number, modulo 2^64."""
    powers = np.full(most + 1, base, np.uint64)
    powers[0] = 1
    return np.cumprod(powers)


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of 64 bits of each number (the finaliser of MurmurHash3)."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        numbers = (numbers ^ (numbers >> np.uint64(33))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(33))


def told_by_many(chats: Iterable[Sequence[Message]]) -> frozenset[str]:
    """Return the messages that over a tenth of these chats have, and two at least.

    They are examples that prompts share, such as those of a few-shot prompt, and no question's own.
    """
    counts: Counter[str] = Counter()
    total = 0
    for before in chats:
        total += 1
        counts.update({message.content for message in before})
    most = max(1, total // 10)
    return frozenset(content for content, count in counts.items() if count > most)


def asked(before: Sequence[Message], text: str, shared: Collection[str] = ()) -> str:
    """Return what a question asks: its text, after what was said before it.

    System messages are left out, and those that prompts share.
    """
    own = [each.content for each in before if each.role != "system" and each.content not in shared]
    return "\n".join([*own, text])


def text_digest(text: str) -> bytes:
    """Return ``DIGEST_BYTES`` that are equal for texts that differ in case and space alone."""
    return digest(" ".join(text.casefold().split()))


def digest(text: str) -> bytes:
    """Return ``DIGEST_BYTES`` of any text, which may hold lone surrogates."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).digest()


def shared_phrase(text: str, other: str, words: int) -> str:
    """Return the longest run of words that two overlapping texts share, normalised."""
    first_text, runs = _Text.of(text, words), _Text.of(other, words).runs
    longest = (0, 0)
    begin = until = 0  # of the stretch of shared runs that overlap or touch
    for start, end, run in first_text.spans:
        if run not in runs:
            continue
        begin, until = (begin if start <= until else start), end
        longest = max(longest, (begin, until), key=lambda stretch: stretch[1] - stretch[0])
    return " ".join(first_text.words[slice(*longest)])


@dataclass(frozen=True)
class _Text:
    """The words of a text, and its runs with their places."""

    words: Sequence[str]
    spans: Sequence[tuple[int, int, Run]]  # start, end, and the words between them
    runs: frozenset[Run]

    @classmethod
    def of(cls, text: str, words: int) -> _Text:
        words_of_text = normalised_words(text)
        spans = [
            (start, end, tuple(words_of_text[start:end]))
            for start, end in _spans(words_of_text, words)
        ]
        return cls(words_of_text, spans, frozenset(run for _, _, run in spans))


def _overlap(first_text: _Text, other: _Text) -> bool:
    """Return whether the runs that two texts share make up at least half of one of them."""
    shared = first_text.runs & other.runs
    return any(2 * _covered(text, shared) >= len(text.words) for text in (first_text, other))


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
        text = compatible(text).casefold().translate(SIGNS)
        text = INVISIBLE.sub("", text)
    if "\\" in text:
        for pattern, word in LATEX:
            text = pattern.sub(word, text)
    text = THOUSANDS.sub("", APOSTROPHES.sub("", text))
    return WORD.findall(text) or [text.strip()]


def compatible(text: str) -> str:
    """Return a text in compatibility form (NFKC), with at most MOST_MARKS marks in a row.

    Python sorts marks in a time that grows with the square of their number.
    """
    return unicodedata.normalize("NFKC", _MORE_MARKS.sub(r"\1", text))


def _weight(word: str) -> int:
    """Return what a word weighs, in halves of a word."""
    return 1 if _CHARACTER.match(word) else 2


def _spans(text: Sequence[str], words: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of every shortest run that weighs as much as ``words`` words."""
    weights = [_weight(word) for word in text]
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

    For people, who see that something stood there; ``safe`` is for agents. Line feeds and tabs
    stay.
    """
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() or sign in "\n\t" else sign.encode("unicode_escape").decode()
        for sign in text
    )


def safe(text: str) -> str:
    """Return a text that every table, tokenizer and terminal takes, and that reads as it stands.

    Halves of characters (lone surrogates) become U+FFFD, control characters become spaces, and
    characters that change the order of writing or cannot be seen are left out: fillers, and signs
    that select a form of no character or a second one. A joiner stays, but not two in a row.
    """
    if text.isascii() and text.isprintable():
        return text
    for pattern, instead in UNSAFE_PATTERNS:
        text = pattern.sub(instead, text)
    return text

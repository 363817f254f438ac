"""Cut a long text to the passages that fit a question best (BM25), in the order of the text."""

from __future__ import annotations

from tasks.tools.bm25 import PIECE, best, index_texts, words

K1, B = 1.2, 0.75  # of BM25: the values that Lucene takes
GAP = "..."  # stands where something is left out


def cut(text: str, question: str, passage_words: int, characters: int) -> str:
    """Return at most ``characters`` of a text: its best passages of ``passage_words`` words.

    Passages lie side by side from the start of the text. The best ones are taken while they fit,
    then those at the beginning of the text, and shown in the order of the text. Passages without a
    word of the question come after all others. Where not even one fits, its beginning is shown.
    """
    text = text.strip()
    if len(text) <= characters:
        return text
    passages = split(text, passage_words)
    if not passages:
        return ""
    chosen: list[int] = []
    for place in _ranked(passages, question):
        longer = _joined(passages, sorted([*chosen, place]))
        if len(longer) > characters:
            break
        chosen.append(place)
    if not chosen:
        place = next(iter(_ranked(passages, question)))
        return passages[place][: max(0, characters - len(GAP))].rstrip() + GAP[:characters]
    return _joined(passages, sorted(chosen))


def split(text: str, passage_words: int) -> list[str]:
    """Return the passages of a text; a character of a script without spaces counts as a word."""
    pieces = list(PIECE.finditer(text))
    firsts = pieces[::passage_words]
    lasts = [
        pieces[min(at + passage_words, len(pieces)) - 1]
        for at in range(0, len(pieces), passage_words)
    ]
    return [text[first.start() : last.end()] for first, last in zip(firsts, lasts, strict=True)]


def _ranked(passages: list[str], question: str) -> list[int]:
    """Return all places, those that fit the question first."""
    wanted = words(question)
    found = best(index_texts(passages, K1, B), wanted, len(passages)) if wanted else []
    return list(dict.fromkeys([*found, *range(len(passages))]))


def _joined(passages: list[str], places: list[int]) -> str:
    """Return passages in order, with a mark where some are left out."""
    parts: list[str] = [] if places[0] == 0 else [GAP]
    for before, place in zip([places[0] - 1, *places], places, strict=False):
        if place != before + 1:
            parts.append(GAP)
        parts.append(passages[place])
    if places[-1] != len(passages) - 1:
        parts.append(GAP)
    return "\n".join(parts)

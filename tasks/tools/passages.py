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
    indices: list[int] = []
    for index in _ranked(passages, question):
        longer = _joined(passages, sorted([*indices, index]))
        if len(longer) > characters:
            break
        indices.append(index)
    if not indices:
        index = next(iter(_ranked(passages, question)))
        return passages[index][: max(0, characters - len(GAP))].rstrip() + GAP[:characters]
    return _joined(passages, sorted(indices))


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
    """Return the indices of all passages, those that fit the question first."""
    query_words = words(question)
    matches = best(index_texts(passages, K1, B), query_words, len(passages)) if query_words else []
    return list(dict.fromkeys([*matches, *range(len(passages))]))


def _joined(passages: list[str], indices: list[int]) -> str:
    """Return passages in order, with a mark where some are left out."""
    parts: list[str] = [] if indices[0] == 0 else [GAP]
    for before, index in zip([indices[0] - 1, *indices], indices, strict=False):
        if index != before + 1:
            parts.append(GAP)
        parts.append(passages[index])
    if indices[-1] != len(passages) - 1:
        parts.append(GAP)
    return "\n".join(parts)

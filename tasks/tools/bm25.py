"""BM25 over texts, as the library bm25s computes it: for the search tool and for passages of pages.

search.py has the formula. Texts and queries are hostile input; only their words are compared.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import regex

from tasks.trees.words import UNSPACED, compatible

# One character can stand for LIGATURE of them (U+FDFA), and a page of those would take ten seconds.
LIGATURE = 18
MOST_GROWTH = 3  # of a text, beside its first ligature
# In scripts with spaces a word is a run of letters, digits and the marks that belong to them.
WORD = regex.compile(r"[\p{L}\p{N}][\p{L}\p{N}\p{M}]*")
_CHARACTER = regex.compile(rf"[{UNSPACED}]")
_RUN = regex.compile(rf"[{UNSPACED}]+|[^{UNSPACED}]+")
PIECE = regex.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")


def words(text: str) -> list[str]:
    """Return the words of a text as they are compared: without case and compatibility forms.

    Text without spaces between words gives its characters and pairs of neighbours.
    """
    result = []
    for word in WORD.findall(compatible(text)[: MOST_GROWTH * len(text) + LIGATURE].casefold()):
        if word.isascii():
            result.append(word)
        else:
            result += [part for run in _RUN.findall(word) for part in _parts(run)]
    return result


def _parts(run: str) -> list[str]:
    """Return a run of one kind of script whole, or its characters and pairs of neighbours."""
    return [*run, *map("".join, pairwise(run))] if _CHARACTER.match(run) else [run]


def index_texts(texts: Iterable[str], k1: float, b: float) -> Any:
    """Index texts by their words; ``k1`` and ``b`` are those of the formula."""
    import bm25s  # imported here: it is slow, and few recipes search

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it logs much at the level DEBUG
    vocabulary: dict[str, int] = {}
    corpus = [
        [vocabulary.setdefault(word, len(vocabulary)) for word in words(text)] for text in texts
    ]
    index = bm25s.BM25(method="lucene", k1=k1, b=b, dtype="float64", backend="numpy")
    index.index((corpus, vocabulary), create_empty_token=False, show_progress=False)
    return index


def best(index: Any, query: Sequence[str], count: int) -> list[int]:
    """Return places of the ``count`` best documents that have a word of the query, best first.

    Scores are summed in double and compared in single precision, so that rounding does not order
    documents whose exact scores are equal; those are ordered by place.
    """
    ids = index.get_tokens_ids(sorted(set(query)))
    if not ids:
        return []
    scores = index.get_scores_from_ids(ids)
    places = np.flatnonzero(scores)
    scores = scores[places].astype(np.float32)
    if len(places) > count:
        least = np.partition(scores, -count)[-count]
        places, scores = places[scores >= least], scores[scores >= least]
    return places[np.argsort(-scores, kind="stable")][:count].tolist()

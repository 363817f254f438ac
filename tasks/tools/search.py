"""The search tool: BM25 over the recipe's corpus of documents.

The score of a document is the sum over the different words of the query of

    idf(word) * tf / (tf + k1 * (1 - b + b * length / mean length)),
    idf(word) = ln(1 + (N - n + 0.5) / (n + 0.5)),

tf: how often the document has the word; n of the N documents have it; lengths in words (Robertson
and Zaragoza 2009, section 3.4; the idf is that of Lucene, which is never negative: Kamphuis et al.
2020, table 1). A document's words are those of its title and of its text, so an entry comes before
shorter ones that mention it. Split long documents into passages: an agent reads only the beginning
of each.

Queries are hostile input; they are only compared with the words of the corpus.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import regex
from pydantic import (
    model_validator,
)

from params.schema.base import (
    Frozen,
    Positive,
    PositiveFloat,
    Probability,
    check_below_sources,
)
from tasks.trees.outcomes import Outcome
from tasks.trees.tables import read_rows, write_table
from tasks.trees.tree import Document, Observation
from tasks.trees.words import UNSPACED

Run = Callable[[Sequence[str]], list[Observation]]

DOCUMENTS = "documents.parquet"
DOCUMENT_TABLE = pa.schema({"title": pa.string(), "text": pa.string()})

# In scripts with spaces a word is a run of letters, digits and the marks that belong to them.
_WORD = regex.compile(r"[\p{L}\p{N}][\p{L}\p{N}\p{M}]*")
_CHARACTER = regex.compile(rf"[{UNSPACED}]")
_RUN = regex.compile(rf"[{UNSPACED}]+|[^{UNSPACED}]+")
_PIECE = regex.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
_INSIDE_WORD = regex.compile(rf"[[\p{{L}}\p{{N}}\p{{M}}]--[{UNSPACED}]]", regex.V1)


class Search(Frozen):
    """The search tool: BM25 (Robertson and Zaragoza 2009) over the recipe's corpus."""

    corpus: Path | None  # documents below data/sources/; null: those that the questions come with
    results: Positive  # documents a query, at most
    snippet_words: Positive  # of one document, at most
    query_characters: Positive  # a longer query is refused
    k1: PositiveFloat  # how soon a word that is repeated stops counting
    b: Probability  # how much a long document is held back

    @model_validator(mode="after")
    def _lies_where_dvc_looks(self) -> Search:
        if self.corpus:
            check_below_sources(self.corpus)
        return self


def save_corpus(documents: Sequence[Document], folder: Path) -> None:
    """Write the documents to ``folder``, in their order; equal documents give equal bytes.

    Raises ValueError for a document without a title, without a word in its text, or with half a
    character, and for two equal documents.
    """
    seen: set[Document] = set()
    for place, document in enumerate(documents, 1):
        fault = "is there twice: remove one" if document in seen else _fault(document)
        if fault:
            raise ValueError(f"document {place} of the corpus ({document.title[:80]!r}) {fault}")
        seen.add(document)
    columns = {
        "title": [document.title for document in documents],
        "text": [document.text for document in documents],
    }
    write_table(pa.table(columns, schema=DOCUMENT_TABLE), folder / DOCUMENTS)


def corpus_faults(settings: Search, source: str) -> list[str]:
    """Return why a corpus does not fit questions from ``source``; empty where it does."""
    brings_its_own = source == "encyclopedia"
    if brings_its_own != (settings.corpus is not None):
        return []
    return [
        f"tools.search.corpus is {settings.corpus} and prepare.questions.source is "
        f"{source}: an encyclopedia brings its corpus (null), other sources need a file "
        "of documents below data/sources/"
    ]


@contextmanager
def search_tool(settings: Search, folder: Path) -> Iterator[Run]:
    """Index a corpus of ``save_corpus``; yield ``run(queries) -> observations``, in their order.

    The index is not stored: it has five times the documents' size, and depends on ``k1`` and ``b``.

    Outcomes: "ok" (the text has one line per document, best first, equally good ones in the order
    of the corpus); "no_results" (no document has a word of the query); "empty_query" (it has no
    word); "query_too_long" (not searched). Raises ValueError for a corpus that is missing or empty.
    """
    file = folder / DOCUMENTS
    if not file.is_file():
        raise ValueError(f"{file} does not exist: run the stage prepare, which writes the corpus")
    documents = [Document(**row) for row in read_rows(file)]
    if not documents:
        raise ValueError(
            f"{file} has no documents to search: set tools.search.corpus in the recipe"
        )
    index = build_index(documents, settings)
    yield lambda queries: [_answer(query, index, documents, settings) for query in queries]


def words(text: str) -> list[str]:
    """Return the words of a text as they are compared: without case and compatibility forms.

    Text without spaces between words gives its characters and pairs of neighbours.
    """
    found = []
    for word in _WORD.findall(unicodedata.normalize("NFKC", text).casefold()):
        if word.isascii():
            found.append(word)
        else:
            found += [part for run in _RUN.findall(word) for part in _parts(run)]
    return found


def _parts(run: str) -> list[str]:
    """Return a run of one kind of script whole, or its characters and pairs of neighbours."""
    return [*run, *map("".join, pairwise(run))] if _CHARACTER.match(run) else [run]


def line(document: Document) -> str:
    """Return a document on one line: title and text, or the text if it begins with the title."""
    title, text = (" ".join(part.split()) for part in (document.title, document.text))
    begins = text.startswith(title) and not _INSIDE_WORD.match(text, len(title))
    return text if begins else f"{title}: {text}"


def build_index(documents: Sequence[Document], settings: Search) -> Any:
    """Index titles and texts. 2,000 documents of 40 words take 0.1 s, 200,000 take 10 s."""
    import bm25s  # imported here: it is slow, and few recipes search

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it logs much at the level DEBUG
    vocabulary: dict[str, int] = {}
    corpus = [
        [
            vocabulary.setdefault(word, len(vocabulary))
            for word in words(f"{document.title} {document.text}")
        ]
        for document in documents
    ]
    index = bm25s.BM25(
        method="lucene", k1=settings.k1, b=settings.b, dtype="float64", backend="numpy"
    )
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


def snippet(text: str, count: int) -> str:
    """Return the first ``count`` words of a text, or characters of a script without spaces.

    An ellipsis marks that the text is longer.
    """
    pieces = list(islice(_PIECE.finditer(text), count + 1))
    return text if len(pieces) <= count else text[: pieces[count - 1].end()] + "..."


def _answer(query: str, index: Any, documents: Sequence[Document], settings: Search) -> Observation:
    """Return the observation for one query."""
    if len(query) > settings.query_characters:
        limit = settings.query_characters
        return Observation(Outcome.QUERY_TOO_LONG, f"query too long: at most {limit} characters")
    wanted = words(query)
    if not wanted:
        return Observation(Outcome.EMPTY_QUERY, "empty query")
    places = best(index, wanted, settings.results)
    if not places:
        return Observation(Outcome.NO_RESULTS, "no results")
    shown = [snippet(line(documents[place]), settings.snippet_words) for place in places]
    return Observation(Outcome.OK, "\n".join(shown))


def _fault(document: Document) -> str | None:
    """Return the fault of a document with the remedy, or None."""
    if not document.title.strip():
        return "has no title: give it one"
    if not _WORD.search(document.text):
        return "has no word in its text: write one, or remove the document"
    try:
        f"{document.title}{document.text}".encode()
    except UnicodeEncodeError:
        return "has half a character (a lone surrogate): remove it"
    return None

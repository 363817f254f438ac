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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

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
from tasks.tools import bm25
from tasks.tools.bm25 import PIECE, WORD, best, words
from tasks.tools.contract import Opening, OpenTool, ToolKind, text_spec, text_tool
from tasks.trees.outcomes import Outcome
from tasks.trees.tables import read_rows, write_table
from tasks.trees.tree import Document, Observation
from tasks.trees.words import UNSPACED

Run = Callable[[Sequence[str]], list[Observation]]

DOCUMENTS = "documents.parquet"
DOCUMENT_TABLE = pa.schema({"title": pa.string(), "text": pa.string()})

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
    for position, document in enumerate(documents, 1):
        fault = "is there twice: remove one" if document in seen else _fault(document)
        if fault:
            raise ValueError(f"document {position} of the corpus ({document.title[:80]!r}) {fault}")
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


SPEC = text_spec(
    "search",
    "Search the documents for words. The result has the beginnings of the best documents, one a "
    "line, best first.",
    "query",
    "The words to search for.",
)


@contextmanager
def _open(settings: Search, opening: Opening) -> Iterator[OpenTool]:
    with search_tool(settings, opening.corpus) as run:
        yield text_tool(SPEC, run)


TOOL = ToolKind(Search, _open, corpus_faults)


def line(document: Document) -> str:
    """Return a document on one line: title and text, or the text if it begins with the title."""
    title, text = (" ".join(part.split()) for part in (document.title, document.text))
    begins = text.startswith(title) and not _INSIDE_WORD.match(text, len(title))
    return text if begins else f"{title}: {text}"


def build_index(documents: Sequence[Document], settings: Search) -> Any:
    """Index titles and texts. 2,000 documents of 40 words take 0.1 s, 200,000 take 10 s."""
    texts = (f"{document.title} {document.text}" for document in documents)
    return bm25.index_texts(texts, settings.k1, settings.b)


def snippet(text: str, count: int) -> str:
    """Return the first ``count`` words of a text, or characters of a script without spaces.

    An ellipsis marks that the text is longer.
    """
    pieces = list(islice(PIECE.finditer(text), count + 1))
    return text if len(pieces) <= count else text[: pieces[count - 1].end()] + "..."


def _answer(query: str, index: Any, documents: Sequence[Document], settings: Search) -> Observation:
    """Return the observation for one query."""
    if len(query) > settings.query_characters:
        limit = settings.query_characters
        return Observation(Outcome.QUERY_TOO_LONG, f"query too long: at most {limit} characters")
    query_words = words(query)
    if not query_words:
        return Observation(Outcome.EMPTY_QUERY, "empty query")
    positions = best(index, query_words, settings.results)
    if not positions:
        return Observation(Outcome.NO_RESULTS, "no results")
    shown = [snippet(line(documents[position]), settings.snippet_words) for position in positions]
    return Observation(Outcome.OK, "\n".join(shown))


def _fault(document: Document) -> str | None:
    """Return the fault of a document with the remedy, or None."""
    if not document.title.strip():
        return "has no title: give it one"
    if not WORD.search(document.text):
        return "has no word in its text: write one, or remove the document"
    try:
        f"{document.title}{document.text}".encode()
    except UnicodeEncodeError:
        return "has half a character (a lone surrogate): remove it"
    return None

"""The search of the web, through a server that speaks Serper's JSON.

A query is sent as ``{"q": query, "num": results}``, with the API key in the header X-API-KEY. The
answer has ``organic``, a list of ``{title, link, snippet}``, and may have ``answerBox`` and
``knowledgeGraph``. Both the query and the answer are hostile: the query is sent as a value of
JSON only, and of the answer only short texts are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import anyio
import httpx
from anyio.from_thread import start_blocking_portal
from pydantic import AfterValidator, model_validator

from params.schema.addresses import check_endpoint, check_key_travels_safely, is_loopback
from params.schema.base import Frozen, NonNegative, Positive, PositiveFloat
from tasks.tools.contract import Opening, OpenTool, ToolKind
from tasks.tools.web_cache import Cache
from tasks.tools.web_client import (
    ENCODINGS,
    RequestBudget,
    WaitBudget,
    WebError,
    check_admitted,
    check_not_moved,
    exchange,
    key_faults,
    read_key,
    reported_as,
    retrying,
    side_by_side,
)
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation, ToolSpec
from tasks.trees.words import safe

PLACE = "tools.http_search"  # in a recipe
ANSWER_BYTES = 2**20  # of one answer, at most
QUERY_REFUSED = (400, 413, 414, 422)  # statuses that say that the query is at fault
FIELD_CHARACTERS = 4000  # of one text in an answer that are kept, at most
FIELDS = {  # the parts of an answer that are read, and the texts in each
    "answerBox": ("title", "answer", "snippet", "link"),
    "knowledgeGraph": ("title", "type", "description", "website"),
    "organic": ("title", "link", "snippet"),
}
SPEC = ToolSpec(
    "http_search",
    "Search the web. Returns titles, addresses and snippets of pages, best first.",
    {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "what to look for"}},
        "required": ["query"],
    },
)


class HttpSearch(Frozen):
    """The search of the web, through a server that speaks Serper's JSON."""

    url: Annotated[str, AfterValidator(check_endpoint)] = "https://google.serper.dev/search"
    key_variable: str | None  # environment variable with the API key; null: no key is needed
    results: Positive  # pages a query, at most
    snippet_characters: Positive  # of one page, at most
    query_characters: Positive  # a longer query is refused
    seconds: PositiveFloat  # for one request, its answer included
    retries: NonNegative  # after the status 429 or 5xx, or without a connection
    concurrency: Positive  # requests at once, at most
    budget: Positive | None  # requests while the tool is open, at most; null: any number

    @model_validator(mode="after")
    def _keeps_the_key(self) -> HttpSearch:
        check_key_travels_safely(self.url, self.key_variable)
        return self


@dataclass(frozen=True)
class _Searching:
    """What the queries of one opening share."""

    settings: HttpSearch
    key: str
    client: httpx.AsyncClient
    cache: Cache
    budget: RequestBudget
    turns: anyio.CapacityLimiter


@contextmanager
def open_search(settings: HttpSearch, opening: Opening) -> Iterator[OpenTool]:
    """Open the search; its requests share one client, in a thread of their own.

    Outcomes: OK; NO_RESULTS; EMPTY_QUERY; QUERY_TOO_LONG; BAD_ARGUMENTS (the server refuses the
    query); UNAVAILABLE (after all retries, or after a request without an answer in time, or the
    answer is not Serper's JSON); OVER_BUDGET.
    Raises ValueError where the key is missing; queries raise SettingError where it is refused.
    """
    key = read_key(PLACE, settings.key_variable)
    limits = httpx.Limits(max_connections=settings.concurrency)
    client = httpx.AsyncClient(
        limits=limits,
        timeout=settings.seconds,
        follow_redirects=False,
        trust_env=not is_loopback(settings.url),
    )
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(client):
        turns = anyio.CapacityLimiter(settings.concurrency)
        budget = RequestBudget(settings.budget)
        searching = _Searching(settings, key, client, Cache("http_search"), budget, turns)

        def run(calls: Sequence[Call]) -> list[Observation]:
            queries = [safe(str(call.values.get("query", call.argument))) for call in calls]
            return portal.call(side_by_side, partial(_answer, searching), queries)

        yield OpenTool([SPEC], run)


async def _answer(searching: _Searching, query: str) -> Observation:
    """Return the observation for one query. Raises WebError."""
    settings = searching.settings
    if len(query) > settings.query_characters:
        limit = settings.query_characters
        return Observation(Outcome.QUERY_TOO_LONG, f"query too long: at most {limit} characters")
    if not query.strip():
        return Observation(Outcome.EMPTY_QUERY, "empty query")
    cache_key = (settings.url, query, settings.results)
    texts = searching.cache.find(*cache_key)
    if texts is None:
        with reported_as(Outcome.UNAVAILABLE, of=Outcome.TIMEOUT):  # whatever the query is
            waits = WaitBudget.of(settings.seconds, settings.retries)
            texts = await retrying(partial(_ask, searching, query), settings.retries, waits)
        searching.cache.keep(texts, *cache_key)
    lines = _lines(texts, settings)
    if not lines:
        return Observation(Outcome.NO_RESULTS, "no results")
    return Observation(Outcome.OK, "\n".join(lines))


async def _ask(searching: _Searching, query: str) -> dict[str, list[dict[str, str]]]:
    """Ask the server once; return the texts of its answer."""
    settings, client = searching.settings, searching.client
    body = {"q": query, "num": settings.results}
    headers = ENCODINGS | ({"X-API-KEY": searching.key} if searching.key else {})
    request = client.build_request("POST", settings.url, json=body, headers=headers)
    host = request.url.host
    async with searching.turns:
        searching.budget.spend()
        answer = await exchange(client, request, host, settings.seconds, ANSWER_BYTES)
    check_not_moved(request, answer, f"{PLACE}.url")
    check_admitted(request, answer, PLACE, settings.key_variable)
    if answer.status != 200:
        reason = f"{host} answered with the status {answer.status}"
        refused = answer.status in QUERY_REFUSED
        raise WebError(Outcome.BAD_ARGUMENTS if refused else Outcome.UNAVAILABLE, reason)
    try:
        search_results = json.loads(answer.body)
    except (ValueError, RecursionError):
        search_results = None
    if not isinstance(search_results, dict) or not isinstance(search_results.get("organic"), list):
        raise WebError(Outcome.UNAVAILABLE, f"{host} answered something else than search results")
    return _texts(search_results, searching.key)


def _texts(search_results: Mapping[str, Any], key: str) -> dict[str, list[dict[str, str]]]:
    """Return the texts of an answer, part by part; a server that repeats the key is silenced."""
    parts = {}
    for part, names in FIELDS.items():
        entries = search_results.get(part)
        entries = entries if isinstance(entries, list) else [entries]
        read = [
            {name: _text(entry.get(name), key) for name in names}
            for entry in entries
            if isinstance(entry, dict)
        ]
        parts[part] = [entry for entry in read if any(entry.values())]
    return parts


def _text(value: Any, key: str) -> str:
    """Return a text on one line, without the key; "" for anything else than a text."""
    if not isinstance(value, str):
        return ""
    plain = safe(value)  # first: what it leaves out must not hide the key
    clear = plain.replace(key, "[key]") if key else plain
    return " ".join(clear.split())[:FIELD_CHARACTERS]


def _lines(texts: Mapping[str, Sequence[Mapping[str, str]]], settings: HttpSearch) -> list[str]:
    """Return one line a result: what the server answers by itself first, then pages."""
    lines = [
        _line(box["title"], box["link"], box["answer"] or box["snippet"], settings)
        for box in texts["answerBox"][:1]
    ]
    lines += [
        _line(entry["title"], entry["website"], entry["description"] or entry["type"], settings)
        for entry in texts["knowledgeGraph"][:1]
    ]
    pages = texts["organic"][: settings.results]
    return lines + [_line(p["title"], p["link"], p["snippet"], settings) for p in pages]


def _line(title: str, link: str, text: str, settings: HttpSearch) -> str:
    """Return ``title (link): text``; an ellipsis marks that the text is longer."""
    most = settings.snippet_characters
    cut = text if len(text) <= most else text[:most].rstrip() + "..."
    heading = " ".join(part for part in (title, f"({link})" if link else "") if part)
    return ": ".join(part for part in (heading, cut) if part)


def faults(settings: HttpSearch, source: str) -> list[str]:
    """Return why the search cannot work on this machine."""
    return key_faults(PLACE, settings.key_variable)


TOOL = ToolKind(HttpSearch, open_search, faults, repeatable=False)

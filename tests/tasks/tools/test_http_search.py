"""The search of the web against a real server on loopback: answers, failures, keys, limits."""

import gzip
import itertools
import json
import logging
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.tools.contract import Opening
from tasks.tools.http_search import TOOL, HttpSearch, _lines, _texts
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call
from tests.tasks.tools.web_server import Reply, as_json, in_turn, serving
from tests.waiting import LONGEST

KEY = "secret-0123456789abcdef"
PAGES = [
    {"title": "Port Birch", "link": "https://a.example/1", "snippet": "A town that makes soap."},
    {"title": "Soap", "link": "https://a.example/2", "snippet": "How " * 40},
]
GOOD = as_json({"organic": PAGES})
PLAIN = {
    "key_variable": "TEST_SEARCH_KEY",
    "results": 3,
    "snippet_characters": 30,
    "query_characters": 100,
    "seconds": 5.0,
    "retries": 2,
    "concurrency": 4,
    "budget": None,
}


def settings(server, **changes):
    return HttpSearch.model_validate({"url": f"{server.url}/search", **PLAIN, **changes})


def opened(server, **changes):
    return TOOL.open(settings(server, **changes), Opening(Path("corpus"), 2))


def ask(server, *queries, **changes):
    with opened(server, **changes) as tool:
        return tool.run([Call("http_search", query) for query in queries])


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BEAMLINE_WEB_CACHE", raising=False)
    monkeypatch.setenv("TEST_SEARCH_KEY", KEY)
    monkeypatch.setattr("tasks.tools.web_client.FIRST_WAIT", 0.02)
    return tmp_path


def test_good_answer_is_read_and_kept(project):
    box = {"title": "Soap town", "answer": "Port Birch"}
    graph = {"title": "Port Birch", "type": "Town", "website": "https://birch.example"}
    with serving(
        in_turn(as_json({"organic": PAGES, "answerBox": box, "knowledgeGraph": graph}))
    ) as s:
        (seen,) = ask(s, "soap")
        assert seen.outcome == Outcome.OK
        assert seen.text.split("\n") == [
            "Soap town: Port Birch",
            "Port Birch (https://birch.example): Town",
            "Port Birch (https://a.example/1): A town that makes soap.",
            "Soap (https://a.example/2): " + ("How " * 8)[:30].rstrip() + "...",
        ]
        ((path, headers, body),) = s.asked
        assert (path, json.loads(body)) == ("/search", {"q": "soap", "num": 3})
        assert headers["X-API-KEY"] == KEY
        assert ask(s, "soap") == [seen]  # another opening
        assert len(s.asked) == 1
        assert len(ask(s, "soap", results=1)[0].text.split("\n")) == 3
        assert len(s.asked) == 2
    assert [KEY in file.read_text() for file in project.rglob("*.json")] == [False, False]


def test_busy_server_is_asked_again_when_it_says():
    busy = Reply(status=429, headers={"Retry-After": "1"})
    with serving(in_turn(busy, Reply(status=503), GOOD)) as s:
        assert ask(s, "soap")[0].outcome == Outcome.OK
        assert s.at[1] - s.at[0] >= 1.0
        assert len(s.asked) == 3


@pytest.mark.parametrize(
    ("reply", "requests"),
    [
        (Reply(status=500), 3),
        (Reply(status=429, headers={"Retry-After": "3600"}), 1),
        (Reply(status=302, headers={"Location": "http://a.example/"}), 1),
        (Reply(b"<html>"), 1),
        (Reply(b"[" * 200_000), 1),
        (as_json([1, 2]), 1),
        (as_json({"organic": "none"}), 1),
        (Reply(b" " * 10_000_000), 1),
        (Reply(gzip.compress(b" " * 10_000_000), headers={"Content-Encoding": "gzip"}), 1),
        (Reply(b"no gzip", headers={"Content-Encoding": "gzip"}), 3),
        (Reply(b"odd", headers={"Content-Encoding": "br"}), 1),
    ],
)
def test_bad_answer_is_unavailable_and_not_kept(reply, requests, project):
    with serving(in_turn(reply)) as s:
        (seen,) = ask(s, "soap")
        assert (seen.outcome, len(s.asked)) == (Outcome.UNAVAILABLE, requests)
        assert "127.0.0.1" in seen.text and KEY not in seen.text
    assert not list(project.rglob("*.json"))


@pytest.mark.parametrize(
    ("status", "remedy"),
    [(401, "a valid key"), (402, "top it up"), (403, "may ask"), (404, "tools.http_search.url")],
)
def test_a_wrong_key_or_address_ends_the_run_by_name(status, remedy):
    with serving(in_turn(Reply(status=status))) as s:
        with pytest.raises(RuntimeError, match=f"status {status}: .*{remedy}") as caught:
            ask(s, "soap", "towns")
        assert KEY not in str(caught.value)


def test_redirect_is_named_and_not_followed():
    with serving(lambda path, body: Reply(b"{}")) as other:
        moved = Reply(status=307, headers={"Location": f"{other.url}/x"})
        with serving(lambda path, body: moved) as s:
            (seen,) = ask(s, "soap")
        assert f"{s.host.partition(':')[0]} redirects to {other.url}/x" in seen.text
        assert (seen.outcome, other.asked) == (Outcome.UNAVAILABLE, [])


def test_slow_and_absent_servers():
    with serving(in_turn(Reply(pause=LONGEST))) as s:
        began = time.monotonic()
        assert ask(s, "soap", seconds=0.3)[0].outcome == Outcome.UNAVAILABLE
        assert time.monotonic() - began < LONGEST / 2
    assert ask(s, "soap")[0].outcome == Outcome.UNAVAILABLE  # it is closed now


def test_drip_of_headers_ends_in_time():
    class Dripping(Reply):
        @property
        def headers(self):
            def drip():
                for number in itertools.count():
                    time.sleep(0.5)
                    yield f"X-{number}", "drop"

            return type("Drops", (), {"items": lambda _: drip()})()

        @headers.setter
        def headers(self, value):
            pass

    with serving(in_turn(Dripping())) as s:
        began = time.monotonic()
        assert ask(s, "soap", seconds=0.5)[0].outcome == Outcome.UNAVAILABLE
        assert time.monotonic() - began < 40  # clients read no more than a hundred headers


def test_budget_and_concurrency():
    with serving(in_turn(as_json({"organic": PAGES}, pause=0.05))) as s:
        seen = ask(s, *map(str, range(12)), budget=8, concurrency=3)
        outcomes = [observation.outcome for observation in seen]
        assert outcomes.count(Outcome.OK) == len(s.asked) == 8
        assert outcomes.count(Outcome.OVER_BUDGET) == 4
        assert s.most_busy == 3


def test_odd_queries():
    with serving(in_turn(as_json({"organic": []}))) as s:
        seen = ask(s, "", " ", "x" * 101, "half \ud800 a character", '"}, {"q": "\x00')
    names = ["empty_query", "empty_query", "query_too_long", "no_results", "no_results"]
    assert [observation.outcome for observation in seen] == names
    sent = {json.loads(body)["q"] for _, _, body in s.asked}
    assert sent == {"half \ufffd a character", '"}, {"q": " '}


def test_key_is_nowhere(project, caplog):
    """A server that repeats the key, and logs of every level."""
    caplog.set_level(logging.DEBUG)
    echo = as_json({"organic": [{"title": KEY, "snippet": f"your key is {KEY}"}]})
    with serving(in_turn(echo, Reply(status=500))) as s:
        seen = [*ask(s, "soap"), *ask(s, "other", retries=0)]
        chosen = settings(s)
    kept = [file.read_text() for file in project.rglob("*.json")]
    said = [*(o.text for o in seen), *kept, caplog.text, chosen.model_dump_json()]
    assert len(kept) == 1 and seen[0].text == "[key]: your key is [key]"
    assert not any(KEY in text for text in said)


def test_missing_key_is_a_fault_before_work(monkeypatch, tmp_path):
    with serving(in_turn(GOOD)) as s:
        chosen = settings(s)
        assert TOOL.faults(chosen, "any") == []
        monkeypatch.setenv("TEST_SEARCH_KEY", f"{KEY}\nX-Other: 1")
        (fault,) = TOOL.faults(chosen, "any")
        assert KEY not in fault
        monkeypatch.delenv("TEST_SEARCH_KEY")
        (fault,) = TOOL.faults(chosen, "any")
        assert "TEST_SEARCH_KEY" in fault and "export" in fault
        with pytest.raises(ValueError, match="TEST_SEARCH_KEY"), opened(s):
            pass
        monkeypatch.setenv("BEAMLINE_CALLS", str(tmp_path))  # a replay asks nobody
        assert TOOL.faults(chosen, "any") == []
        with opened(s):
            pass


@pytest.mark.parametrize(
    "url", ["ftp://a.example", "a.example", "https://me:pw@a.example", "https://a.example/?key=1"]
)
def test_address_without_room_for_secrets(url):
    with pytest.raises(ValidationError):
        HttpSearch.model_validate({**PLAIN, "url": url})
    with pytest.raises(ValidationError, match="plain text"):
        HttpSearch.model_validate({**PLAIN, "url": "http://a.example/search"})


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(st.characters()) | st.just(KEY),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("title", "link", "snippet", "answer"), ANY_JSON)
)


@given(
    st.fixed_dictionaries(
        {"organic": st.lists(ENTRY | ANY_JSON, max_size=4)},
        optional={"answerBox": ENTRY | ANY_JSON, "knowledgeGraph": ANY_JSON},
    )
)
def test_any_json_gives_lines(found):
    chosen = HttpSearch.model_validate(PLAIN)
    for line in _lines(_texts(found, KEY), chosen):
        assert line.encode() and "\n" not in line and KEY not in line

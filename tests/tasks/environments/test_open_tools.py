"""The tools of a recipe, opened together on a corpus."""

from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from tasks.environments import open_tools
from tasks.settings import load
from tasks.tools import TOOLS
from tasks.tools.search import save_corpus
from tasks.trees.tree import Call, Document, Observation


@pytest.fixture(scope="module")
def tools():
    """The settings of all tools, as a recipe has them."""
    return load("tiny-search").tool_settings


def test_mixed_calls_are_answered_in_order(tools, tmp_path):
    save_corpus([Document("Ada", "poet"), Document("Ben", "baker")], tmp_path)
    calls = [
        Call("search", "Ben"),
        Call("python", "print(6 * 7)"),
        Call("browser", "Ada"),
        Call("search", "Ada"),
        Call("search", ""),
    ]
    with open_tools(tools, 1, tmp_path) as respond:
        assert respond(calls) == [
            Observation("ok", "Ben: baker"),
            Observation("ok", "42"),
            Observation("no_such_tool", "no tool browser"),
            Observation("ok", "Ada: poet"),
            Observation("empty_query", "empty query"),
        ]


def test_without_search_no_corpus_is_needed(tools, tmp_path):
    with open_tools({"python": tools["python"]}, 1, tmp_path / "nowhere") as respond:
        assert respond([Call("python", "print(1)"), Call("search", "Ada")]) == [
            Observation("ok", "1"),
            Observation("no_such_tool", "no tool search"),
        ]


def test_missing_corpus_is_refused_when_opened(tools, tmp_path):
    with (
        pytest.raises(ValueError, match=r"documents\.parquet does not exist: run"),
        open_tools(tools, 1, tmp_path),
    ):
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_tools_close_with_the_block(tools, tmp_path, monkeypatch, fails):
    closed = []

    def opener(name):
        @contextmanager
        def opened(settings, corpus, workers):
            try:
                yield lambda arguments: [Observation("ok", name)] * len(arguments)
            finally:
                closed.append(name)

        return opened

    for name, kind in TOOLS.items():
        monkeypatch.setitem(TOOLS, name, replace(kind, open=opener(name)))
    with suppress(LookupError), open_tools(tools, 1, tmp_path) as respond:
        assert respond([Call("python", "")]) == [Observation("ok", "python")]
        assert closed == []
        if fails:
            raise LookupError
    assert sorted(closed) == sorted(TOOLS)

"""The tools of a recipe, opened together on a corpus."""

import sys
from contextlib import suppress
from pathlib import Path

import pytest

from params.schema.base import Frozen
from tasks.environments import open_environment
from tasks.recipes import load
from tasks.tools.search import save_corpus
from tasks.trees.tree import Call, Document, Observation, Question
from tests.agents import open_tools


@pytest.fixture(scope="module")
def tools():
    """The settings of all tools, as a recipe has them."""
    return load("tiny-search").tools


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


OWN = """
from contextlib import contextmanager
from pathlib import Path
from params.schema.base import Frozen
from tasks.tools.contract import ToolKind, text_spec, text_tool
from tasks.trees.tree import Observation

@contextmanager
def _open(settings, opening):
    try:
        yield text_tool(text_spec("say", "Say.", "text", ""), lambda texts: [
            Observation("ok", text) for text in texts])
    finally:
        Path("closed").touch()

say = ToolKind(Frozen, _open)
again = ToolKind(Frozen, _open)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A working folder with own/say.py."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/say.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "own"]:
        del sys.modules[name]


@pytest.mark.parametrize("fails", [False, True])
def test_tools_close_with_the_block(own, tmp_path, fails):
    with suppress(LookupError), open_tools({"own/say.py:say": Frozen()}, 1, tmp_path) as respond:
        assert respond([Call("say", "a")]) == [Observation("ok", "a")]
        assert not Path("closed").exists()
        if fails:
            raise LookupError
    assert Path("closed").exists()


def test_two_tools_of_one_name_are_refused(own, tmp_path):
    both = {"own/say.py:say": Frozen(), "own/say.py:again": Frozen()}
    with pytest.raises(ValueError, match="several tools called say: rename or remove one"):
        open_tools(both, 1, tmp_path).__enter__()


def test_environment_of_questions(tools, tmp_path):
    question = Question("q", "k", "t", ("42",))
    with open_environment({"python": tools["python"]}, {}, 1, tmp_path) as opened:
        assert [(spec.name, spec.text_parameter) for spec in opened.specs] == [("python", "code")]
        with opened.session() as session:
            ((handle, first),) = session.open([question])
            assert first is None
            assert session.act([(handle, Call("python", "print(42)"))]) == [Observation("ok", "42")]

"""The tools of a recipe, opened together on a corpus."""

from typing import get_args

import pytest

from params.schema.agent import Dialogue
from params.schema.base import PARAMS, read_yaml
from params.schema.recipe import Recipe, check
from tasks.environments import open_tools
from tasks.tools.search import save_corpus
from tasks.trees.tree import Call, Document, Observation

SEARCH = {
    "corpus": "data/sources/corpus.jsonl",
    "results": 1,
    "snippet_words": 9,
    "query_characters": 99,
    "k1": 1.2,
    "b": 0.75,
}


def recipe(*tools: str) -> Recipe:
    """The smoke recipe with these tools."""
    file = PARAMS / "smoke.yaml"
    values = read_yaml(file)
    values["dialogue"]["tools"] = list(tools)
    values["search"] = SEARCH if "search" in tools else None
    return check(values, file)


def test_every_tool_that_a_recipe_may_name_can_be_opened():
    (choices, _) = get_args(Dialogue.model_fields["tools"].annotation)
    assert set(TOOLS) == set(get_args(choices))


def test_a_round_of_mixed_calls_is_answered_in_its_order(tmp_path):
    save_corpus([Document("Ada", "poet"), Document("Ben", "baker")], tmp_path)
    calls = [
        Call("search", "Ben"),
        Call("python", "print(6 * 7)"),
        Call("browser", "Ada"),
        Call("search", "Ada"),
        Call("search", ""),
    ]
    with open_tools(recipe("python", "search"), tmp_path) as respond:
        assert respond(calls) == [
            Observation("ok", "Ben: baker"),
            Observation("ok", "42"),
            Observation("no_such_tool", "no tool browser"),
            Observation("ok", "Ada: poet"),
            Observation("empty_query", "empty query"),
        ]


def test_a_recipe_without_search_needs_no_corpus(tmp_path):
    with open_tools(recipe("python"), tmp_path / "nowhere") as respond:
        assert respond([Call("python", "print(1)"), Call("search", "Ada")]) == [
            Observation("ok", "1"),
            Observation("no_such_tool", "no tool search"),
        ]


def test_a_corpus_that_is_not_there_is_said_before_the_first_call(tmp_path):
    with (
        pytest.raises(
            ValueError, match=r"documents\.parquet does not exist: run the stage prepare"
        ),
        open_tools(recipe("search", "python"), tmp_path),
    ):
        pass

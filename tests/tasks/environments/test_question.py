"""Calls reach their tools together; observations come back in call order."""

import pytest

from tasks.environments.question import respond
from tasks.trees.tree import Call, Observation


@pytest.fixture
def asked():
    """Tool -> the arguments of each time that it ran."""
    return {"python": [], "search": []}


@pytest.fixture
def tools(asked):
    def tool(name):
        def run(arguments):
            asked[name].append(list(arguments))
            return [Observation("ok", f"{name}({argument})") for argument in arguments]

        return run

    return {name: tool(name) for name in asked}


def test_equal_calls_run_once_and_keep_their_order(tools, asked):
    calls = [Call("search", "a"), Call("python", "b"), Call("search", "c"), Call("search", "a")]
    texts = [observation.text for observation in respond(tools, calls)]
    assert texts == ["search(a)", "python(b)", "search(c)", "search(a)"]
    assert asked == {"python": [["b"]], "search": [["a", "c"]]}


def test_no_calls_run_no_tool(tools, asked):
    assert respond(tools, []) == []
    assert asked == {"python": [], "search": []}


def test_unknown_tool_is_an_observation(tools):
    del tools["search"]
    calls = [Call("search", "a"), Call("python", "b"), Call("search", "c")]
    missing = Observation("no_such_tool", "no tool search")
    assert respond(tools, calls) == [missing, Observation("ok", "python(b)"), missing]


@pytest.mark.parametrize("answers", [0, 1, 3])
def test_wrong_number_of_answers_raises(answers):
    tools = {"python": lambda arguments: [Observation("ok", "")] * answers}
    with pytest.raises(ValueError, match="zip"):
        respond(tools, [Call("python", "a"), Call("python", "b")])

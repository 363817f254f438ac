"""Calls reach their tools together; observations come back in call order."""

import pytest

from tasks.environments.question import Questions, answer
from tasks.tools.contract import OpenTool
from tasks.trees.tree import Call, Observation, Question, ToolSpec
from tests.agents import responding


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
    texts = [observation.text for observation in responding(tools)(calls)]
    assert texts == ["search(a)", "python(b)", "search(c)", "search(a)"]
    assert asked == {"python": [["b"]], "search": [["a", "c"]]}


def test_no_calls_run_no_tool(tools, asked):
    assert responding(tools)([]) == []
    assert asked == {"python": [], "search": []}


def test_unknown_tool_is_an_observation(tools):
    del tools["search"]
    calls = [Call("search", "a"), Call("python", "b"), Call("search", "c")]
    missing = Observation("no_such_tool", "no tool search")
    assert responding(tools)(calls) == [missing, Observation("ok", "python(b)"), missing]


@pytest.mark.parametrize("answers", [0, 1, 3])
def test_wrong_number_of_answers_raises(answers):
    tools = {"python": lambda arguments: [Observation("ok", "")] * answers}
    with pytest.raises(ValueError, match="zip"):
        responding(tools)([Call("python", "a"), Call("python", "b")])


ADD = ToolSpec(
    "add",
    "Add.",
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
)


def test_calls_are_checked_before_any_tool_runs():
    """Two tools of one kind get their calls together, with the parameters by name."""
    rounds = []

    def run(calls):
        rounds.append([(call.tool, call.values["a"]) for call in calls])
        return [Observation("ok", str(call.values["a"] + 1)) for call in calls]

    offered = [OpenTool([ADD, ToolSpec("more", "", ADD.parameters)], run)]
    calls = [Call("add", '{"a": 1}'), Call("add", '{"a": "1"}'), Call("more", '{"a": 2}')]
    seen = answer(offered, [*calls, Call("add", "{}"), Call("add", '{"a": 1}')])
    assert [one.outcome for one in seen] == ["ok", "bad_arguments", "ok", "bad_arguments", "ok"]
    assert [seen[0].text, seen[2].text, seen[4].text] == ["2", "3", "2"]
    assert rounds == [[("add", 1), ("more", 2)]]


def test_questions_are_episodes_without_a_state(tools, asked):
    session = Questions(responding(tools))
    question = Question("q", "k", "t", ("1",))
    (first, seen), (second, _) = session.open([question, question])
    third = session.fork(first, 0)
    assert seen is None
    assert len({first, second, third}) == 3
    moves = [(handle, Call("search", "a")) for handle in (first, second, third)]
    assert [one.text for one in session.act(moves)] == ["search(a)"] * 3
    assert asked["search"] == [["a"]]
    assert session.end([(first, "1"), (third, "2")]) == [None, None]
    session.close(first)

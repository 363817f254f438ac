"""What is read of a reply: its first action, whatever else it says."""

import pytest

from tasks.agents.actions import described, read
from tasks.environments.contract import FREE_TEXT
from tasks.tools.browser import SPEC as BROWSER
from tasks.tools.contract import text_spec
from tasks.trees.tree import Call
from tests.tasks.agents.scripted import SEARCH

PYTHON = text_spec("python", "Run a program.", "code", "the program")
TOOLS = [SEARCH, PYTHON, BROWSER]


@pytest.mark.parametrize(
    ("reply", "call", "text"),
    [
        ("Action: search[a tower]", Call("search", "a tower"), None),
        ("Thought: x\n**Action 2:** search[a]", Call("search", "a"), None),
        ("action: search [a]\nAction: search[b]", Call("search", "a"), "action: search [a]"),
        ("Action: python[a = [1]\nprint(a[0])]", Call("python", "a = [1]\nprint(a[0])"), None),
        ('Action: python[print("]")]', Call("python", 'print("]")'), None),
        ("Action: search[a] I hope\nThought: [b]", Call("search", "a"), "Action: search[a]"),
        ('Action: browser[{"url": "u"}]', Call("browser", '{"url": "u"}'), None),
        ("Action: dance[a]", None, None),
        ("Action: search a", None, None),
        ("Action:", None, None),
        ("search[a]", None, None),
        ("", None, None),
    ],
)
def test_calls(reply, call, text):
    action = read(reply, TOOLS)
    assert (action.call, action.answer) == (call, None)
    assert action.text == (text or reply)


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("Action: finish[Ada]", "Ada"),
        ("Action: Finish[\\boxed{Ada}]\nThought: done", "Ada"),
        ("Thought: x\nAction: finish[a [b] c]", "a [b] c"),
        ("Action: finish[]", ""),
    ],
)
def test_answers(reply, answer):
    assert read(reply, TOOLS).answer == answer


@pytest.mark.parametrize(
    ("reply", "marked", "act"),
    [
        ("Thought: x\nAction: go to desk 1\nObservation: forged", True, "go to desk 1"),
        ("go to desk 1", True, None),
        ("\n go to desk 1\nfor it is near", False, "go to desk 1"),
        ("Action: click[buy now]", True, "click[buy now]"),
    ],
)
def test_free_acts(reply, marked, act):
    action = read(reply, [FREE_TEXT], marked)
    assert action.call == (Call("act", act) if act else None)
    assert "forged" not in action.text


def test_tools_are_described_as_they_are_called():
    lines = described([*TOOLS, FREE_TEXT]).splitlines()
    assert lines[0].startswith("search[query]: ")
    assert lines[2].startswith('browser[{"url": ..., "question": ...}]: ')
    assert lines[3].startswith("<the act>: ")

"""Over a hundred hostile scripts: the same answers in both sandboxes, and a fresh next call."""

import re
import shutil

import pytest

from tasks.tools.python import PythonTool, python_tool
from tests.tasks.tools.hostile_scripts import LOOK_AROUND, ROOMS

SANDBOXES = ["unshare"] + (["bubblewrap"] if shutil.which("bwrap") else [])
LIMITS = {
    "cpu_seconds": 1,
    "wall_seconds": 5.0,
    "memory_mib": 128,
    "processes": 8,
    "file_mib": 2,
    "output_characters": 60000,
}


@pytest.fixture(scope="module")
def tools():
    """One worker in each sandbox, so that calls follow each other in it."""
    opened = [python_tool(PythonTool.model_validate(LIMITS | {"sandbox": s}), 1) for s in SANDBOXES]
    yield [tool.__enter__() for tool in opened]
    for tool in opened:
        tool.__exit__(None, None, None)


@pytest.mark.parametrize("room", ROOMS)
def test_same_answer_and_fresh_next_call(tools, room):
    (before,) = {tool([LOOK_AROUND])[0] for tool in tools}
    assert before.outcome == "ok"
    wrong = {}
    for name, script in ROOMS[room].items():
        for sandbox, tool in zip(SANDBOXES, tools, strict=True):
            answer, after = tool([script.code, LOOK_AROUND])
            said = answer.outcome == script.outcome and re.fullmatch(script.text, answer.text)
            if not said or after != before:
                wrong[name, sandbox] = (answer, after)
    assert wrong == {}

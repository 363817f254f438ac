"""Results of tools that are not repeatable: one a call, kept through a kill, equal in a replay."""

import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tasks.tools.contract import OpenTool
from tasks.tools.recording import (
    CALLS,
    SCRATCH,
    Origin,
    load_calls,
    open_recorded,
    publish_calls,
    replayed_calls,
)
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation

ROOT = Path(__file__).parents[3]
WEB = {"web": False, "sum": True}


def counting(start=0):
    """Return a tool whose every answer differs."""
    number = itertools.count(start)
    return OpenTool(
        [], lambda calls: [Observation(Outcome.OK, f"{c.argument}{next(number)}") for c in calls]
    )


def refusing():
    def run(calls):
        raise AssertionError("a replay calls no tool")

    return OpenTool([], run)


def ask(recorder, *arguments, tool="web"):
    return [o.text for o in recorder.tools[tool].run([Call(tool, a) for a in arguments])]


def record(folder, arguments=("a", "b", "a"), scratch=None, tool=None):
    with open_recorded({"web": tool or counting()}, WEB, scratch) as recorder:
        seen = [ask(recorder, argument)[0] for argument in arguments]
        recorder.save_calls(folder)
    return seen


def test_equal_calls_have_one_result(tmp_path):
    with open_recorded({"web": counting(), "sum": counting()}, WEB, None) as recorder:
        assert ask(recorder, "a", "b", "a") == ["a0", "b1", "a0"]
        assert ask(recorder, "b", "c") == ["b1", "c2"]
        assert ask(recorder, "a", "a", tool="sum") == ["a0", "a1"]  # left alone
        recorder.save_calls(tmp_path)
    assert {key: seen.text for key, seen in load_calls(tmp_path / CALLS).items()} == {
        ("web", "a"): "a0",
        ("web", "b"): "b1",
        ("web", "c"): "c2",
    }


def test_table_does_not_depend_on_the_order_of_calls(tmp_path):
    same = OpenTool([], lambda calls: [Observation("ok", c.argument * 2) for c in calls])
    record(tmp_path / "1", ("x", "\ud800", "é"), tool=same)
    record(tmp_path / "2", ("é", "x", "\ud800"), tool=same)
    assert (tmp_path / "1" / CALLS).read_bytes() == (tmp_path / "2" / CALLS).read_bytes()


def test_replay_asks_no_tool(tmp_path, monkeypatch, capsys):
    seen = record(tmp_path / "0")
    other = record(tmp_path / "1", tool=counting(7))
    evaluated = record(tmp_path / "2", tool=counting(9))
    tables = {
        Origin("reinforce", 3): tmp_path / "0" / CALLS,
        Origin("reinforce", 3, attempt=1): tmp_path / "1" / CALLS,
    }
    publish_calls(tables, tmp_path / "data/trees" / CALLS)
    publish_calls(
        {Origin("evaluate/trained", 0): tmp_path / "2" / CALLS}, tmp_path / "data/answers" / CALLS
    )
    monkeypatch.setenv("BEAMLINE_CALLS", str(tmp_path / "data"))
    origins = [*tables, Origin("evaluate/trained", 0)]
    for number, (origin, expected) in enumerate(
        zip(origins, (seen, other, evaluated), strict=True)
    ):
        with open_recorded({"web": refusing()}, WEB, None, replayed_calls(origin)) as recorder:
            assert [ask(recorder, argument)[0] for argument in "aba"] == expected
            recorder.save_calls(tmp_path / "again")
        again = (tmp_path / "again" / CALLS).read_bytes()
        assert again == (tmp_path / str(number) / CALLS).read_bytes()
    assert capsys.readouterr().out == ""


def test_result_that_was_away_is_asked_for_once_more(tmp_path):
    answers = iter([Observation("unavailable", "no line"), Observation("ok", "back")])
    tool = OpenTool([], lambda calls: [next(answers) for _ in calls])
    calls = [Call("web", "a")]

    def run(recorder):
        first = [recorder.tools["web"].run(calls)[0].text for _ in range(2)]
        recorder.ask_again()
        return first + [recorder.tools["web"].run(calls)[0].text for _ in range(2)]

    with open_recorded({"web": tool}, WEB, tmp_path) as recorder:
        assert run(recorder) == ["no line", "no line", "back", "back"]
        recorder.save_calls(tmp_path)
    for scratch, recorded in ((tmp_path, None), (None, load_calls(tmp_path / CALLS))):
        with open_recorded({"web": refusing()}, WEB, scratch, recorded) as recorder:
            assert run(recorder) == ["no line", "no line", "back", "back"]


def test_call_that_is_not_recorded(tmp_path, monkeypatch, capsys):
    record(tmp_path / "0")
    publish_calls({Origin("reinforce", 0): tmp_path / "0" / CALLS}, tmp_path / "data" / CALLS)
    monkeypatch.setenv("BEAMLINE_CALLS", str(tmp_path / "data"))
    recorded = replayed_calls(Origin("reinforce", 0))
    with open_recorded({"web": refusing()}, WEB, None, recorded) as recorder:
        seen = recorder.tools["web"].run([Call("web", "new"), Call("web", "a")])
        assert [o.outcome for o in seen] == [Outcome.UNAVAILABLE, Outcome.OK]
        assert recorder.missed == {("web", "new")}
        recorder.save_calls(tmp_path / "again")
    assert "1 different call" in capsys.readouterr().out
    assert (tmp_path / "again" / CALLS).read_bytes() == (tmp_path / "0" / CALLS).read_bytes()
    assert replayed_calls(Origin("reinforce", 1)) == {}
    monkeypatch.setenv("BEAMLINE_CALLS", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="BEAMLINE_CALLS"):
        replayed_calls(Origin("reinforce", 0))
    monkeypatch.delenv("BEAMLINE_CALLS")
    assert replayed_calls(Origin("reinforce", 0)) is None


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.tasks.tools.test_recording import *

def last(calls):
    if calls[0].argument == "c":
        os.kill(os.getpid(), signal.SIGKILL)
    return inner.run(calls)

inner = counting()
with open_recorded({"web": OpenTool([], last)}, WEB, Path(sys.argv[1])) as recorder:
    print(ask(recorder, "a", "b"), flush=True)
    ask(recorder, "c")
"""


def test_killed_sub_step_sees_the_same_again(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL and ended.stdout == "['a0', 'b1']\n"
    with (tmp_path / SCRATCH).open("a") as file:
        file.write('["web", "half a li')  # a kill while it wrote
    assert record(tmp_path / "1", ("a", "b", "c"), tmp_path, counting(50)) == ["a0", "b1", "c50"]
    assert record(tmp_path / "2", ("a", "b", "c"), tmp_path, refusing()) == ["a0", "b1", "c50"]
    assert (tmp_path / "1" / CALLS).read_bytes() == (tmp_path / "2" / CALLS).read_bytes()


def test_threads_agree_on_one_result(tmp_path):
    barrier, number = threading.Barrier(4), itertools.count()

    def run(calls):
        barrier.wait(5)
        return [Observation("ok", str(next(number)))] * len(calls)

    found = []
    with open_recorded({"web": OpenTool([], run)}, WEB, tmp_path) as recorder:
        work = [threading.Thread(target=lambda: found.append(ask(recorder, "a"))) for _ in range(4)]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
    assert len(found) == 4 and all(seen == found[0] for seen in found)
    assert len((tmp_path / SCRATCH).read_text().splitlines()) == 1

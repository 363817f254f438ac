"""A world that is not repeatable: its answers are recorded, and replayed without it."""

import time
from pathlib import Path

from tasks.environments import open_environment
from tasks.extensions.named import find
from tasks.recipes import kind_of
from tasks.tools.recording import REPLAYED, Origin, publish_calls
from tasks.trees.tree import Call, Question

CLOCK = '''
import time
from pathlib import Path

from tasks.trees.tree import Call, Observation


class Clock:
    """Tell the time."""

    repeatable = False

    def start(self, task, seed):
        Path("asked").open("a").write("start\\n")
        return "it is " + str(time.time_ns())

    def act(self, call):
        Path("asked").open("a").write("act\\n")
        return Observation("ok", str(time.time_ns()), reward=0.5, info={"at": 1})

    def solve(self):
        Path("asked").open("a").write("solve\\n")
        return Call("act", str(time.time_ns())) if time.time_ns() % 7 else None

    def end(self, text):
        return Observation("ok", "", reward=float(time.time_ns() % 7))
'''
TASKS = [Question(name, "clock", "when?", (), data='{"seed": 1}') for name in ("a", "b")]


def played(folder, origin):
    """Play episodes with a fork; return all that was observed."""
    name = "own/clock.py:Clock"
    chosen = kind_of("environment", name).settings()
    seen = []
    with (
        open_environment({}, {name: chosen}, 1, folder) as environment,
        environment.recorded(origin, lambda: folder) as recorded,
    ):
        with recorded.environment.session() as session:
            begun = session.open(TASKS)
            seen += [first for _, first in begun]
            first, second = (handle for handle, _ in begun)
            seen += session.act([(second, Call("act", "x")), (first, Call("act", "x"))])
            branch = session.fork(first, 0)
            seen += session.act([(branch, Call("act", "y")), (first, Call("act", "y"))])
            seen += session.solve([second, first])
            seen += session.end([(first, "done")])
            for handle in (first, second, branch):
                session.close(handle)
        with recorded.environment.session() as session:  # the same tasks, asked once more
            ((again, shown),) = session.open(TASKS[:1])
            seen += [shown, *session.act([(again, Call("act", "x"))])]
        recorded.save_calls(folder)
    return seen


def test_answers_of_a_world_are_replayed(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/clock.py").write_text(CLOCK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    origin = Origin("reinforce", 3)
    seen = played(tmp_path, origin)
    asked = Path("asked").read_text()
    publish_calls({origin: tmp_path / "calls.parquet"}, tmp_path / "data" / "calls.parquet")
    monkeypatch.setenv(REPLAYED, str(tmp_path / "data"))
    time.sleep(0.001)
    assert played(tmp_path, origin) == seen
    assert Path("asked").read_text() == asked, "the world was asked again"
    other = played(tmp_path, Origin("reinforce", 4))
    assert all(each is None or each.outcome == "world_failed" for each in other)


def test_a_repeatable_world_is_not_recorded(tmp_path):
    chosen = find("environment", "frozen_lake").held.settings(
        **{"smallest": 4, "largest": 4, "largest_test": 4, "holes": 0.2, "distance": 3},
        **{"slippery": 0.0, "steps": 9, "sight": None, "hidden": True},
        **{"goal": 1.0, "penalty": -0.1},
    )
    with open_environment({}, {"frozen_lake": chosen}, 1, tmp_path) as environment:
        assert environment.recorded is None

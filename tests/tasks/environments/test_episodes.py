"""Episodes of worlds in processes of their own: forks, replays, and all that a world may do."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tasks.environments import open_environment
from tasks.environments.episodes import Episodes, open_worlds
from tasks.environments.own_world import environment_kind
from tasks.environments.record import seed_of
from tasks.extensions import pool as pools
from tasks.trees.tree import Call, Observation, Question

HERE = Path(__file__).parent
PROJECT = Path(pools.__file__).parents[2]
STEPS = (2, -1, 3, 1, -2)


@pytest.fixture(scope="module", autouse=True)
def user(tmp_path_factory):
    """A working folder with own/worlds.py."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "own").mkdir()
    shutil.copy(HERE / "worlds_of_a_user.py", folder / "own/worlds.py")
    before = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    yield folder
    os.chdir(before)
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] == "own"]:
        del sys.modules[name]


@contextmanager
def session(name, workers=1, seconds=5.0, **settings):
    kind = environment_kind(f"own/worlds.py:{name}")
    with (
        open_worlds(kind, kind.settings(**settings), workers, seconds) as worlds,
        worlds.session() as episodes,
    ):
        yield episodes


@pytest.fixture(scope="module")
def line():
    with session("Line", 2, length=100) as episodes:
        yield episodes


@pytest.fixture(scope="module")
def hasty():
    with session("Line", seconds=3.0, length=100) as episodes:
        yield episodes


def task(seed=5, text="Walk."):
    return Question(f"q{seed}", "line", text, (), data=json.dumps({"seed": seed}))


def move(steps, how=None):
    return Call(
        "move", json.dumps({"steps": steps} if how is None else {"steps": steps, "how": how})
    )


def play(episodes: Episodes, handle, steps=STEPS):
    return [episodes.act([(handle, move(step))])[0] for step in steps]


def test_forked_and_replayed_branches_see_the_same():
    seen = {}
    for name in ("Line", "ForkingLine"):
        with session(name, length=100) as episodes:
            for branch in (0, 3, 5):
                ((handle, first),) = episodes.open([task()])
                before = [first, *play(episodes, handle, STEPS[:branch])]
                copy = episodes.fork(handle, branch)
                assert episodes.episodes[copy].live == (name == "ForkingLine")
                after = play(episodes, handle, STEPS[branch:])
                past = episodes.fork(handle, branch)  # the world has gone on
                further = play(episodes, copy, (1, 1))
                assert play(episodes, past, (1, 1)) == further
                seen[name, branch] = before, after, further
                assert first.info == {"goal": first.info["goal"]}
    for branch in (0, 3, 5):
        assert seen["Line", branch] == seen["ForkingLine", branch]


def test_equal_seeds_give_equal_episodes_everywhere(line):
    """In two processes of one pool; test_..._branches_see_the_same has them in others."""
    tasks = [task(1), task(1), task(2), task(1)]
    opened = line.open(tasks)
    places = [line.episodes[handle].place for handle, _ in opened]
    assert places == [0, 1, 0, 1]
    seen = [[first, *play(line, handle)] for handle, first in opened]
    assert seen[0] == seen[1] == seen[3] != seen[2]


def test_world_that_forgets_its_seed_is_caught():
    with session("CheatingLine", length=100) as episodes:
        ((handle, _),) = episodes.open([task()])
        play(episodes, handle)
        (seen,) = episodes.act([(episodes.fork(handle, 3), move(1))])
        assert (seen.outcome, seen.truncated, seen.reward) == ("replay_differs", True, 0.0)
        assert "text was 'at 2 of 100, drawn" in seen.text


def test_world_that_starts_otherwise_for_an_equal_seed_is_caught():
    with session("CheatingStart") as episodes:
        seen = [first.outcome for _, first in episodes.open([task(5), task(5), task(6)])]
        assert seen == ["ok", "replay_differs", "ok"]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "LookupError: no way"),
        ("hang", "no answer within 3 seconds"),
        ("exit", "exit status 3; it printed: prints do no harm"),
        ("kill", "signal 9"),
        ("number", "act returned int: return a text or an Observation"),
        ("none", "act returned NoneType"),
        ("bytes", "bytes"),
        ("nan", "the reward nan, which is not finite"),
        ("word", "reward is 'much', not a number"),
        ("flag", "terminated is 'yes', not true or false"),
        ("actions", "actions is '[1, 2]', not at most 1000 texts"),
        ("info", "object is not JSON serializable"),
        ("outcome", "outcome is 'answer', not one of a tool call"),
        ("state", "state is '5', not None, or a text"),
        ("large", "bytes, more than 1048576"),
    ],
)
def test_failure_ends_one_episode_and_no_other(hasty, how, text):
    alone, failing, beside = (handle for handle, _ in hasty.open([task()] * 3))
    expected = play(hasty, alone)
    for handle in (failing, beside):
        assert play(hasty, handle, STEPS[:2]) == expected[:2]
    moves = [(failing, move(1, how)), (beside, move(STEPS[2]))]
    failed, went_on = hasty.act(moves)
    assert (failed.outcome, failed.truncated, failed.reward) == ("world_broken", True, 0.0)
    assert text in failed.text
    assert [went_on, *play(hasty, beside, STEPS[3:])] == expected[2:]
    back = hasty.fork(failing, 2)
    assert play(hasty, back, STEPS[2:]) == expected[2:]
    with pytest.raises(ValueError, match="has ended"):
        hasty.act([(failing, move(1))])


@pytest.mark.parametrize("how", ["raise", "hang", "exit"])
def test_act_that_fails_once_is_asked_again(hasty, tmp_path, how):
    (handle, _), (other, _) = hasty.open([task()] * 2)
    expected = play(hasty, other)
    assert play(hasty, handle, STEPS[:2]) == expected[:2]
    (seen,) = hasty.act([(handle, move(STEPS[2], f"first {tmp_path}/{how}"))])
    assert [seen, *play(hasty, handle, STEPS[3:])] == expected[2:]


def test_world_that_says_that_it_is_away_is_not_the_agents_fault(hasty):
    ((handle, _),) = hasty.open([task()])
    (seen,) = hasty.act([(handle, move(1, "away"))])
    assert (seen.outcome, seen.truncated) == ("world_failed", True)
    assert "the database is down" in seen.text


def test_agent_that_ends_a_world_without_a_seed_has_broken_it():
    """The replay differs, and the agent has brought it about."""
    with session("CheatingLine", length=100) as episodes:
        ((handle, _),) = episodes.open([task()])
        play(episodes, handle)
        (seen,) = episodes.act([(handle, move(1, "exit"))])
        assert seen.outcome == "world_broken"


def test_process_killed_from_outside_is_nobodys_fault(line):
    handles = [handle for handle, _ in line.open([task()] * 2)]
    expected = play(line, handles[0], STEPS)
    assert play(line, handles[1], STEPS[:2]) == expected[:2]
    for held in line.worlds.pool.team:
        os.killpg(group_of(held.process.pid), signal.SIGKILL)
    assert play(line, handles[1], STEPS[2:]) == expected[2:]


def group_of(guard):
    """Return the process that a guard has started."""
    return int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])


def test_act_that_does_not_fit_is_a_step_and_reaches_no_world(line):
    ((handle, first),) = line.open([task()])
    wrong = [
        Call("move", '{"steps": "far"}'),
        Call("move", "{"),
        Call("fly", ""),
        Call("move", "[]"),
    ]
    seen = [line.act([(handle, call)])[0] for call in wrong]
    assert [one.outcome for one in seen] == ["bad_arguments"] * 2 + [
        "no_such_tool",
        "bad_arguments",
    ]
    assert {one.key for one in seen} == {first.key}
    assert not any(one.ends for one in seen)
    assert all(one.actions == first.actions for one in seen)
    other = line.fork(handle, 2)
    assert play(line, handle) == play(line, other)


def test_last_reward_and_expert(line):
    ((handle, first),) = line.open([task()])
    goal = first.info["goal"]
    assert line.solve([handle]) == [Call("move", '{"steps": 1}')]
    branch = line.fork(handle, 0)
    right, wrong = line.end([(handle, str(goal)), (branch, "-1")])
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert play(line, line.fork(handle, 0)) == play(line, line.fork(branch, 0))


def test_a_solver_that_fails_is_named():
    words = {0: "KeyError: 'no plan'", 1: "return a Call of two texts", 2: "solve returned 'move'"}
    with session("Solved", length=9) as episodes:
        for seed in range(12):
            ((handle, _),) = episodes.open([task(seed)])
            with pytest.raises(
                ValueError, match=r"own/worlds.py:Solved, task .*solve failed"
            ) as told:
                episodes.solve([handle])
            assert any(word in str(told.value) for word in words.values())


def test_start_that_fails_is_an_observation_that_ends():
    tasks = [task(1, "raise"), task(2), task(3, "die")]
    with session("NoStart") as episodes:
        opened = episodes.open(tasks)
        outcomes = [first.outcome for _, first in opened]
        assert outcomes == ["world_failed", "ok", "world_failed"]
        assert [first.ends for _, first in opened] == [True, False, True]
        assert episodes.act([(opened[1][0], Call("act", "go"))]) == [Observation("ok", "done")]


@pytest.mark.parametrize("data", ["[]", '{"seed": "x"}', "{"])
def test_task_whose_data_are_none_stops(line, data):
    with pytest.raises(ValueError, match="the task q "):
        line.open([Question("q", "k", "t", (), data=data)])


def test_free_text_world_needs_no_observation():
    with session("Echo") as episodes:
        ((handle, first),) = episodes.open([task()])
        assert first.text.startswith("Walk. [")
        assert first.text.endswith("False")
        assert episodes.act([(handle, Call("act", "hal\ud800lo"))]) == [
            Observation("ok", "hal\ufffdlo")
        ]
        episodes.close(handle)
        assert episodes.end([]) == []


def test_seed_is_given_or_of_the_id():
    assert seed_of(task(7)) == 7
    assert seed_of(Question("a", "k", "t", ())) != seed_of(Question("b", "k", "t", ()))


def test_tools_of_the_recipe_work_in_a_world(tmp_path):
    (Path("own") / "sum.py").write_text(
        'def add(a: int, b: int) -> int:\n    """Add two numbers."""\n    return a + b\n'
    )
    name = "own/worlds.py:Line"
    settings = {name: environment_kind(name).settings(length=100)}
    from tasks.tools.own_tool import tool_kind

    tools = {"own/sum.py:add": tool_kind("own/sum.py:add").settings()}
    with open_environment(tools, settings, 1, tmp_path) as opened:
        assert [spec.name for spec in opened.specs] == ["move", "add"]
        with opened.session() as episodes:
            ((handle, first), (other, _)) = episodes.open([task(), task()])
            moves = [(handle, Call("add", '{"a": 1, "b": 2}')), (other, move(2))]
            told, moved = episodes.act(moves)
            assert (told.outcome, told.text, told.key) == ("ok", "3", f"{first.key}\n3")
            assert play(episodes, episodes.fork(handle, 1), (2,)) == [moved]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Wrong", r"start\(self, seed\) has other parameters: write def start\(self, task, seed\)"),
        ("Wrong", r"own/worlds.py:Wrong: the class has no method act: write def act\(self, call\)"),
        ("Needy", r"__init__\(self, size\) wants more than self, and the class has no settings"),
        ("MOVE", r"own/worlds.py:MOVE is a ToolSpec: name a class with start and act"),
        ("Nothing", r"own/worlds.py holds no 'Nothing'.*: it has .*Line"),
    ],
)
def test_class_that_is_no_world_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        environment_kind(f"own/worlds.py:{name}")


def test_what_a_class_says_of_itself():
    kind = environment_kind("own/worlds.py:Graded")
    settings = kind.settings(seconds=3.0)
    assert [spec.name for spec in kind.specs(settings)] == ["say"]
    assert [question.id for question in kind.tasks(settings, "test", 2, 0)] == ["test0", "test1"]
    assert not kind.repeatable
    name, kind, schema = environment_kind("own/worlds.py:Malformed").faults(settings)
    assert "'say it' has other than letters" in name
    assert "no JSON schema of type 'object'" in kind
    assert "'objekt' is not valid" in schema


def test_default_tasks_differ_in_their_seeds_over_all_splits():
    kind = environment_kind("own/worlds.py:Line")
    made = {s: kind.tasks(kind.settings(), s, 300, 0) for s in ("train", "validation", "test")}
    seeds = [seed_of(question) for questions in made.values() for question in questions]
    assert len(set(seeds)) == 900
    assert made["test"][0].text == "Walk along a line to the goal."
    assert kind.tasks(kind.settings(), "test", 300, 1) != made["test"]
    assert (
        environment_kind("own/worlds.py:Line").tasks(kind.settings(), "test", 300, 0)
        == made["test"]
    )


def test_no_world_outlives_its_trainer(user):
    program = (
        "import test_episodes as t\n"
        "with t.session('Line', 2, 60.0, length=100) as episodes:\n"
        "    handles = [handle for handle, _ in episodes.open([t.task()] * 2)]\n"
        "    print(*[held.process.pid for held in episodes.worlds.pool.team],\n"
        "          *[t.group_of(held.process.pid) for held in episodes.worlds.pool.team])\n"
        "    import sys; sys.stdout.flush()\n"
        "    episodes.act([(handle, t.move(1, 'hang')) for handle in handles])\n"
    )
    paths = os.pathsep.join([str(PROJECT), str(HERE)])
    trainer = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    )
    with trainer.stdout:
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 4
    trainer.kill()
    trainer.wait()
    for pid in pids:
        subprocess.run(["tail", f"--pid={pid}", "-f", "/dev/null"], timeout=600, check=True)

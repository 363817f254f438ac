"""A user's code in processes of its own: what it returns, and how it fails."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.extensions import pool as pools
from tasks.extensions.pool import Reply, open_pool
from tests.waiting import wait_until

PROJECT = Path(pools.__file__).parents[2]
CODE = '''
import ctypes, json, os, signal, socket, struct, subprocess, sys, time

ORPHAN = "sleep 60 > /dev/null & echo $!"

def fork(end):
    """Fork, let the child go on by ``end``, and return its exit status after that."""
    child = os.fork()
    if child == 0:
        return end()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def reply(number):
    """Write to the channel what a late reply to a call would be."""
    message = json.dumps({"number": number, "value": "late"}).encode()
    os.write(int(sys.argv[1]), struct.pack(">I", len(message)) + message)

class Forks(dict):
    """Forks where it is written as JSON."""
    def items(self):
        return [("fork", fork(lambda: 5))]

def twice(what):
    """Do what the text asks for, or return it twice."""
    print("noise", what)
    print("noise", file=sys.stderr)
    return {
        "raise": lambda: 1 / 0,
        "exit": lambda: sys.exit("bye"),
        "hang": lambda: time.sleep(60),
        "large": lambda: "x" * 10_000_000,
        "bytes": lambda: b"x",
        "nan": lambda: [float("nan")],
        "surrogate": lambda: "a\\ud800b",
        "end": lambda: os._exit(3),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "segfault": lambda: ctypes.string_at(0),
        "pid": os.getpid,
        "child": lambda: subprocess.Popen(["sleep", "60"]).pid,
        "session": lambda: subprocess.Popen(["sleep", "60"], start_new_session=True).pid,
        "orphan": lambda: int(subprocess.check_output(["setsid", "sh", "-c", ORPHAN])),
        "noise": lambda: os.write(1, b"z" * 1_000_000),
        "fork returns": lambda: fork(lambda: "wrong"),
        "fork exits": lambda: fork(lambda: sys.exit(7)),
        "fork says why": lambda: fork(lambda: sys.exit("why")),
        "fork raises": lambda: fork(lambda: 1 / 0),
        "fork in the result": lambda: Forks(a=1),
        "late": lambda: reply(0),
        "modules": lambda: sorted(sys.modules),
    }.get(what, lambda: what * 2)()

class Count:
    """Counts its calls."""
    def __init__(self, settings):
        self.left = settings["start"]

    def __call__(self, step):
        self.left += step
        return self.left

    def add(self, step):
        return self(step)
'''


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A folder with own/code.py, which is the working folder."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "own").mkdir()
    (folder / "own/code.py").write_text(CODE)
    (folder / "own/broken.py").write_text("import nothing_of_this_name\n")
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def pool(own):
    with open_pool("own/code.py:twice", {}, 2, 2.0) as opened:
        yield opened


@pytest.mark.parametrize(
    ("what", "failure", "message"),
    [
        ("raise", "raised", "ZeroDivisionError: division by zero"),
        ("exit", "raised", "SystemExit: bye"),
        ("hang", "timeout", "no answer within 2 seconds"),
        ("large", "too_large", "returned 10000002 bytes, more than 1048576"),
        ("bytes", "not_json", "returned bytes, which is no JSON"),
        ("nan", "not_json", "returned list, which is no JSON"),
        ("end", "died", "exit status 3; it printed: noise end\nnoise"),
        ("kill", "died", "signal 9"),
        ("segfault", "died", "Segmentation fault"),
    ],
)
def test_failures_have_names_and_leave_the_others_alone(pool, what, failure, message):
    replies = pool.call_all([["a"], [what], ["b"]])
    assert replies[0] == Reply("aa")
    assert replies[2] == Reply("bb")
    assert replies[1].failure == failure
    assert message in replies[1].message


def test_print_and_half_characters_do_not_disturb(pool):
    replies = pool.call_all([["noise"], ["surrogate"], ["é😀"], ["\ud800"]])
    assert [reply.value for reply in replies] == [1_000_000, "a\ufffdb", "é😀é😀", "\ufffd" * 2]


def test_process_imports_little(pool):
    modules = pool.call_all([["modules"]])[0].value
    assert not {"torch", "prefect", "pydantic", "numpy"} & set(modules)


def test_forked_child_never_answers(pool):
    """It ends with the status that Python would give it; the call returns what its parent does."""
    statuses = {"returns": 0, "exits": 7, "says why": 1, "raises": 1, "in the result": {"fork": 0}}
    calls = [[f"fork {how}"] for how in statuses]
    replies = pool.call_all([call for each in calls for call in (each, ["a"])])
    assert [reply.value for reply in replies[1::2]] == ["aa"] * len(calls)
    assert [reply.value for reply in replies[::2]] == list(statuses.values())


def test_reply_to_another_call_is_refused(own):
    with open_pool("own/code.py:twice", {}, 1, 2.0) as pool:
        replies = pool.ask([(0, "", [what]) for what in ("a", "late", "b")])
        assert [reply.value for reply in replies] == ["aa", None, "bb"]
        assert replies[1].failure == "died"
        assert "it answered another call than the last one" in replies[1].message


def test_process_killed_while_idle_is_replaced(pool):
    (before,) = pool.call_all([["pid"]])
    os.kill(before.value, signal.SIGKILL)
    (after,) = pool.call_all([["pid"]])
    assert after.failure is None
    assert after.value != before.value


def test_requests_keep_their_place_and_order(own):
    with open_pool("own/code.py:Count", {"start": 10}, 2, 5.0) as pool:
        requests = [(0, "add", [1]), (1, "add", [5]), (0, "", [1]), (1, "add", [5])]
        assert [reply.value for reply in pool.ask(requests)] == [11, 15, 12, 20]
        assert pool.ask([(0, "missing", [])])[0].message.startswith("AttributeError: ")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("own/broken.py:a", r"own/broken.py:a: ModuleNotFoundError: .*\(own/broken.py, line 1\)"),
        ("own/code.py:none", "own/code.py:none: AttributeError: "),
        ("own/code.py:Count", "own/code.py:Count: TypeError: "),
    ],
)
def test_code_that_cannot_be_loaded_is_an_error_at_once(own, reference, message):
    with pytest.raises(RuntimeError, match=message), open_pool(reference, {}, 1, 5.0):
        pass


def test_no_process_outlives_its_trainer(own):
    """Neither a hanging call nor a process that the code has started, in whatever session."""
    program = (
        "from tasks.extensions.pool import open_pool\n"
        "with open_pool('own/code.py:twice', {}, 2, 60.0) as pool:\n"
        "    replies = pool.call_all([['pid'], ['child'], ['session'], ['orphan']])\n"
        "    print(*[reply.value for reply in replies], flush=True)\n"
        "    pool.call_all([['hang'], ['hang']])\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
    )
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 4 and all(map(alive, pids))
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not any(map(alive, pids)))
    trainer.stdout.close()


def test_no_process_outlives_the_pool_or_a_call_that_hangs(own):
    with open_pool("own/code.py:twice", {}, 1, 1.0) as opened:
        before = [opened.call_all([[what]])[0].value for what in ("session", "orphan")]
        opened.call_all([["hang"]])
        after = [opened.call_all([[what]])[0].value for what in ("session", "orphan")]
        assert [alive(pid) for pid in (*before, *after)] == [False, False, True, True]
    assert not any(map(alive, after))


def alive(pid):
    """Return whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False

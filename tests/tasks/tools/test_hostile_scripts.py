"""Over a hundred hostile scripts: the same answers in both sandboxes, and a fresh next call."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle

import pytest

from tasks.tools.python import PythonTool, python_tool
from tasks.tools.sandbox import is_real_root
from tests.examples import is_thorough
from tests.tasks.tools.hostile_scripts import LOOK_AROUND, ROOMS

SANDBOXES = ["unshare"] + (["bubblewrap"] if shutil.which("bwrap") else [])
LIMITS = {
    "cpu_seconds": 1,
    "wall_seconds": 60.0,  # more than any script needs that does not wait for ever
    "memory_mib": 128,
    "processes": 8,
    "file_mib": 2,
    "output_characters": 60000,
}
WAITING = {
    name: script
    for room in ROOMS.values()
    for name, script in room.items()
    if script.outcome == "wall_timeout"
}


def opened(sandbox, workers=1, **others):
    return python_tool(PythonTool.model_validate(LIMITS | {"sandbox": sandbox} | others), workers)


def side_by_side(run, *lists):
    with ThreadPoolExecutor(len(SANDBOXES)) as pool:
        return list(pool.map(run, *lists))


def is_right(script, answer):
    return answer.outcome == script.outcome and bool(re.fullmatch(script.text, answer.text))


@pytest.fixture(scope="module")
def tools():
    """One worker in each sandbox, so that calls follow each other in it."""
    with ExitStack() as stack:
        yield [stack.enter_context(opened(sandbox)) for sandbox in SANDBOXES]


@pytest.fixture(scope="module")
def before(tools):
    """What a call sees before any script."""
    (seen,) = {tool([LOOK_AROUND])[0] for tool in tools}
    assert seen.outcome == "ok"
    return seen


@pytest.mark.parametrize("room", ROOMS)
def test_same_answer_and_fresh_next_call(tools, before, room):
    """A look after each script, and scripts that use up a second, are of one sandbox by turns.

    In .ci/run they are of both.
    """
    scripts = {name: each for name, each in ROOMS[room].items() if name not in WAITING}
    by_outcome = sorted(scripts, key=lambda name: scripts[name].outcome == "timeout")
    turns = list(zip(by_outcome, cycle(range(len(SANDBOXES))), strict=False))

    def answers(place, tool):
        found = {}
        for name, turn in turns:
            mine = is_thorough() or turn == place
            if mine or scripts[name].outcome != "timeout":
                said = tool([scripts[name].code, *([LOOK_AROUND] if mine else [])])
                found[name, SANDBOXES[place]] = (said[0], said[-1] if mine else before)
        return found

    found = side_by_side(answers, range(len(tools)), tools)
    wrong = {
        at: (answer, after)
        for each in found
        for at, (answer, after) in each.items()
        if not is_right(scripts[at[0]], answer) or after != before
    }
    assert wrong == {}


def test_scripts_that_wait_end_and_leave_a_fresh_next_call(before):
    """Each has a worker, so that all wait at the same time."""

    def answers(sandbox):
        with opened(sandbox, len(WAITING), wall_seconds=3.0) as tool:
            found = tool([script.code for script in WAITING.values()])
            return found, tool([LOOK_AROUND] * len(WAITING))

    for found, after in side_by_side(answers, SANDBOXES):
        assert all(map(is_right, WAITING.values(), found)), found
        assert {*after} == {before}


# Only root can give each worker a user of its own, by which the kernel counts what is on its way.
IN_FLIGHT = f"for _ in range({50 if is_real_root() else 10}): socket.send_fds(pair[0], [b'x'], [0])"
HOLD = f"""
import fcntl, os, socket, sys, time
program, null = open(sys.executable, 'rb'), open('/dev/null', 'w')
fcntl.flock(program, fcntl.LOCK_EX)
fcntl.flock(null, fcntl.LOCK_EX)
fcntl.lockf(null, fcntl.LOCK_EX)
listener = socket.socket(socket.AF_UNIX)
listener.bind('\\0note')
listener.listen()
open('/dev/shm/note', 'w').write('x')
pair = socket.socketpair()
{IN_FLIGHT}
pipes = []
try:
    while True: pipes.append(os.pipe())
except OSError: pass
time.sleep(1.5)
print('held')
"""
LOOK = f"""
import fcntl, os, socket, sys
program, null = open(sys.executable, 'rb'), open('/dev/null', 'w')
fcntl.flock(program, fcntl.LOCK_EX | fcntl.LOCK_NB)
fcntl.flock(null, fcntl.LOCK_EX | fcntl.LOCK_NB)
fcntl.lockf(null, fcntl.LOCK_EX | fcntl.LOCK_NB)
print(socket.socket(socket.AF_UNIX).connect_ex('\\0note'), os.listdir('/dev/shm'))
print(sorted(int(name) for name in os.listdir('/proc') if name.isdigit()))
pair = socket.socketpair()
{IN_FLIGHT}
print(fcntl.fcntl(os.pipe()[1], 1032), open('/proc/self/net/unix').read().count('\\n'))
"""
LATER = f"import time; time.sleep(0.5)\n{LOOK}"


def test_calls_at_the_same_time_do_not_see_each_other():
    def answers(sandbox):
        with opened(sandbox, 2) as tool:
            return [*tool([LOOK]), *tool([HOLD, LATER])]

    for alone, held, beside in side_by_side(answers, SANDBOXES):
        assert (held.outcome, held.text) == ("ok", "held")
        assert beside == alone
        assert alone.outcome == "ok"

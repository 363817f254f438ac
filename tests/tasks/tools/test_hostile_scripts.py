"""Over a hundred hostile scripts: the same answers in both sandboxes, and a fresh next call."""

import re
import shutil

import pytest

from tasks.tools.python import PythonTool, python_tool
from tasks.tools.sandbox import is_real_root
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
import fcntl, os, socket, sys, time
time.sleep(0.5)
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


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_calls_at_the_same_time_do_not_see_each_other(sandbox):
    with python_tool(PythonTool.model_validate(LIMITS | {"sandbox": sandbox}), 2) as tool:
        (alone,) = tool([LOOK])
        held, beside = tool([HOLD, LOOK])
    assert (held.outcome, held.text) == ("ok", "held")
    assert beside == alone
    assert alone.outcome == "ok"

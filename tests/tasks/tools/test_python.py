"""The Python tool, attacked: real sandboxes, real processes, hostile code."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tasks.tools import control_group, python
from tasks.tools.python import PythonTool, choose_backend, python_tool
from tasks.trees.tree import Observation
from tests.examples import examples
from tests.tasks.tools.hostile_scripts import TIME
from tests.waiting import LONGEST

SANDBOXES = ["unshare"] + (["bubblewrap"] if shutil.which("bwrap") else [])
PROJECT = Path(__file__).parents[3]
LIMITS = {
    "cpu_seconds": 1,
    "wall_seconds": 10.0,
    "memory_mib": 64,
    "processes": 8,
    "file_mib": 2,
    "output_characters": 2000,
}


def limits(sandbox: str, **changes) -> PythonTool:
    return PythonTool.model_validate(LIMITS | changes | {"sandbox": sandbox})


@pytest.fixture(scope="module", params=[*SANDBOXES, "none"])
def run(request):
    """Two workers with limits but, under "none", no sandbox."""
    with python_tool(limits(request.param), 2) as call:
        yield call


@pytest.fixture(scope="module", params=SANDBOXES)
def boxed(request):
    """One worker in a sandbox, so that calls follow each other in it."""
    with python_tool(limits(request.param), 1) as call:
        yield call


def one(call, code: str) -> Observation:
    (observation,) = call([code])
    return observation


# ---- what code does and what comes back


@pytest.mark.parametrize(
    ("code", "outcome", "text"),
    [
        ("1 + 1", "ok", "2"),
        ("x = 2\nx ** 10", "ok", "1024"),
        ("'text'", "ok", "text"),
        ("None", "ok", ""),
        ("x = 3", "ok", ""),
        ("", "ok", ""),
        ("print('a', 'b')\nprint(3)", "ok", "a b\n3"),
        ("print('no break', end='')", "ok", "no break"),
        ("import sys\nprint(1)\nprint(2, file=sys.stderr)\nprint(3)", "ok", "1\n2\n3"),
        ("print('ä\\ud800')", "ok", "ä\\ud800"),
        ("1 / 0", "error", "ZeroDivisionError: division by zero"),
        ("print('so far', end='')\n1 / 0", "error", "so far\nZeroDivisionError: division by zero"),
        ("x = (", "error", "SyntaxError: '(' was never closed"),
        ("x = 1\n y = 2", "error", "IndentationError: unexpected indent"),
        (" x = 1", "error", "IndentationError: unexpected indent"),
        ("nothing", "error", "NameError: name 'nothing' is not defined"),
        ("input()", "error", "EOFError: EOF when reading a line"),
        ("import sys; sys.exit()", "ok", ""),
        ("exit('no')", "error", "SystemExit: no"),
        ("import os; os._exit(0)", "killed", ""),
        ("import os; os.kill(os.getpid(), 9)", "killed", ""),
        ("import os; os.abort()", "killed", ""),
        ("def f(): return f()\nf()", "error", "RecursionError: maximum recursion depth exceeded"),
        ("raise KeyboardInterrupt", "error", "KeyboardInterrupt"),
        ("__name__", "ok", "__main__"),
        ("import sys; sys.argv", "ok", "['']"),
        ("import os; dict(os.environ)", "ok", "{}"),
        (
            "import threading, time\n"
            "threading.Thread(target=lambda: (time.sleep(0.05), print('late'))).start()",
            "ok",
            "late",
        ),
        (
            "from dataclasses import dataclass\n"
            "@dataclass\nclass P:\n    x: int\n"
            "from concurrent.futures import ThreadPoolExecutor\n"
            "print(ThreadPoolExecutor(2).submit(P, 4).result())",
            "ok",
            "P(x=4)",
        ),
    ],
)
def test_outcome_and_text(run, code, outcome, text):
    assert one(run, code) == Observation(outcome, text)


@pytest.mark.parametrize(
    ("code", "outcome", "text"),
    [
        ("```python\nprint(41)\n```", "ok", "41"),
        ("```\n40 + 1\n```", "ok", "41"),
        ("```py\nprint(41)", "ok", "41"),
        ("print(41)\n```", "ok", "41"),
        ("```Python\r\nprint(41)\r\n```\r\n", "ok", "41"),
        ("~~~python\nprint(41)\n~~~", "ok", "41"),
        ("`print(41)`", "ok", "41"),
        ("I add them:\n\n```python\nx = 40 + 1\nprint(x)\n```\nThis prints x.", "ok", "41"),
        ("1. ```python\n   x = 41\n   print(x)\n   ```", "ok", "41"),
        ("```python\nx = 41\n```\nthen\n```python\nprint(x)\n```", "ok", "41"),
        ("```bash\nls\n```\n```python\nprint(41)\n```", "ok", "41"),
        ("\ufeffprint(41)", "ok", "41"),
        ("if True:\n\u00a0\u00a0\u00a0\u00a0print(41)", "ok", "41"),
        ("print(\u202f41\u200b)", "ok", "41"),
        ("x\u00a0= 'a\u00a0b'  # it's\u00a0odd\nprint(len(x), ascii(x))", "ok", "3 'a\\xa0b'"),
        ("    x = 41\n    print(x)", "ok", "41"),
        ("print('```')", "ok", "```"),
        ("s = '\\n```python\\n1\\n```'\nprint(s.count('`'))", "ok", "6"),
        ("```bash\nls\n```", "error", "SyntaxError: the code is a block of bash: send Python"),
        ("```python\nx = (\n```", "error", "SyntaxError: '(' was never closed"),
    ],
)
def test_code_as_chats_write_it_is_run(run, code, outcome, text):
    assert one(run, code) == Observation(outcome, text)


def test_results_come_in_the_order_of_the_calls(run):
    codes = [f"import time; time.sleep({0.03 if i % 5 == 0 else 0}); {i}" for i in range(40)]
    assert run(codes) == [Observation("ok", str(i)) for i in range(40)]
    assert run([]) == []


def test_odd_text_passes_the_protocol(run):
    long = one(run, "x = '" + "é" * 100_000 + "'\nlen(x)")
    assert long == Observation("ok", "100000")
    null, surrogate, after = run(["print(1)\0", "'\ud800'", "1 + 1"])
    assert null.outcome == "error" and "null byte" in null.text
    assert surrogate == Observation("ok", "?")
    assert after == Observation("ok", "2")


@examples(20, deadline=None, suppress_health_check=list(HealthCheck))
@given(code=st.text(alphabet=st.characters(exclude_categories=()), max_size=300))
def test_any_text_is_a_call(boxed, code):
    assert one(boxed, code).outcome in {"ok", "error"}
    assert one(boxed, "1 + 1") == Observation("ok", "2")


# ---- limits


def test_cpu_time_is_limited_and_output_kept(run):
    assert one(run, "print('start')\nwhile True: pass") == Observation("timeout", "start")


@pytest.mark.parametrize("sandbox", [*SANDBOXES, "none"])
def test_wall_time_is_the_backstop(sandbox):
    stop = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    with python_tool(limits(sandbox, wall_seconds=3.0), 2) as call:
        sleeper, stopped = call(["print(1)\nimport time; time.sleep(60)", stop])
    assert sleeper == Observation("wall_timeout", "1")
    assert stopped == Observation("wall_timeout", "")


@pytest.mark.parametrize(
    "code",
    [
        "print('before')\nx = bytearray(10 ** 9)",
        "print('before')\nx = []\nwhile True: x.append('a' * 10 ** 6)",
        "print('before')\nx = 0\nwhile True: x = [x, x]",
    ],
)
def test_memory_is_limited(run, code):
    assert one(run, code) == Observation("memory", "before\nMemoryError")


@pytest.mark.parametrize(
    "code",
    [
        "while True: print('x' * 10)",
        "import os\nwhile True: os.write(2, b'x' * 10 + b'\\n')",
        "import os\nos.fork()\nos.fork()\nwhile True: print('x' * 10)",
        "print('x' * 10_000_000)",
    ],
)
def test_output_is_cut_at_the_limit(run, code):
    observation = one(run, code)
    assert observation.outcome == "output_limit"
    assert 1990 <= len(observation.text) <= 2000
    assert set(observation.text) == {"x", "\n"} or observation.text == "x" * 2000


def test_output_of_exactly_the_limit_is_whole_and_more_is_not(run):
    assert one(run, "print('é' * 2000, end='')") == Observation("ok", "é" * 2000)
    longer = one(run, "print('é' * 2001, end='')")
    assert longer == Observation("output_limit", "é" * 2000)


def test_files_are_limited(run):
    code = "with open('big', 'wb') as file: file.write(bytes(2 ** 21 + 1))"
    assert one(run, code) == Observation("error", "OSError: [Errno 27] File too large")


def test_scratch_space_is_limited_as_a_whole(boxed):
    code = "for i in range(3): open(str(i), 'wb').write(bytes(2 ** 20))"
    assert one(boxed, code) == Observation("error", "OSError: [Errno 28] No space left on device")


def test_fork_bomb_is_contained(boxed):
    observation = one(boxed, "import os\nwhile True: os.fork()")
    assert observation.outcome == "error" and "BlockingIOError" in observation.text
    count = "import os\nn = 0\ntry:\n    while os.fork(): n += 1\nexcept OSError: print(n)"
    assert one(boxed, count).text.splitlines()[0] == str(LIMITS["processes"] - 1)


# ---- one call is nothing to the next


def test_state_does_not_pass_to_the_next_call(boxed):
    changes = (
        "import math, builtins, random, sys, os\n"
        "math.pi = 3; x = 5; builtins.len = None; sys.path.clear(); os.environ['A'] = '1'\n"
        "random.random(); open('/tmp/note', 'w').write('hello'); open('/dev/shm/note', 'w')"
    )
    assert one(boxed, changes).outcome == "ok"
    look = (
        "import math, os, sys\n"
        "print(math.pi, 'x' in globals(), len('ab'), len(sys.path) > 2, dict(os.environ))\n"
        "print(os.listdir('/tmp'), os.getcwd())"
    )
    assert one(boxed, look).text == "3.141592653589793 False 2 True {}\n[] /tmp"


def test_memory_holds_nothing_of_earlier_calls(boxed):
    search = (
        "# %s\n"
        "found = []\n"
        "import re\n"
        "with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb', 0) as memory:\n"
        "    for line in maps:\n"
        "        if 'rw' in line:\n"
        "            start, end = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "            memory.seek(start)\n"
        "            found += re.findall(rb'secret-of-[a-z]*-call', memory.read(end - start))\n"
        "print(sorted({str(word, 'ascii') for word in found}))"
    )
    boxed(["print('secret-of-' + 'an-earlier-call') # secret-of-earlier-call"] * 3)
    assert one(boxed, search % "secret-of-this-call").text == "['secret-of-this-call']"


def test_addresses_tell_nothing_of_earlier_calls(boxed):
    look = "print(object(), id([]), id({}), id(1e300))"
    seen = {one(boxed, look)}
    for code in (
        "1",
        "print('x' * 3000)",
        "import os\nos.fork()\nos.fork()",
        "1 / 0",
        "x = [0] * 10**7",
    ):
        one(boxed, code)
        seen.add(one(boxed, look))
    assert len(seen) == 1


def test_daemons_end_with_the_call():
    marker = marker_of(1)
    daemon = (
        "import os, time\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork(): os._exit(0)\n"
        "        os.closerange(0, 64)\n"
        "        while True: time.sleep(1)\n"
        "print('left')"
    )
    for sandbox in [*SANDBOXES, "none"]:
        with python_tool(limits(sandbox, output_characters=marker), 1) as call:
            call(["1"])
            usual = settled_count(marker)
            assert one(call, daemon) == Observation("ok", "left")
            assert settled_count(marker) == usual
        assert processes(marker) == []


def test_results_are_the_same_in_every_run():
    code = (
        "import random\n"
        "print(set('abcdefgh'), hash('a'), random.random())\n"
        "class A: pass\n"
        "print({object, A, int}, A() is None)"
    )
    for sandbox in SANDBOXES:
        seen = set()
        for _ in range(2):
            with python_tool(limits(sandbox), 2) as call:
                seen |= {observation.text for observation in call([code] * 4)}
        assert len(seen) == 1


# ---- the walls


@pytest.mark.parametrize("folder", ["/", "/usr", "/usr/bin", "/dev", "/root", sys.base_prefix])
def test_nothing_can_be_written_outside_tmp(boxed, folder):
    observation = one(boxed, f"open('{folder}/x', 'w')")
    assert observation.outcome == "error"
    assert "Read-only" in observation.text or "No such file" in observation.text


def test_project_home_and_host_are_not_visible(boxed):
    code = "import os; [os.path.exists(p) for p in {}]"
    hidden = [str(PROJECT), str(Path.home() / ".bashrc"), "/etc", "/home", "/var", "/sys", "/mnt"]
    assert one(boxed, code.format(hidden)) == Observation("ok", str([False] * len(hidden)))
    prefix = Path(sys.base_prefix).resolve()
    top = {"bin", "dev", "proc", "tmp", "usr", prefix.parts[1]}
    listing = one(boxed, "import os; print(*(p for p in os.listdir('/') if 'lib' not in p))")
    assert set(listing.text.split()) == top


def test_code_is_nobody_and_alone(boxed):
    code = (
        "import os\n"
        "caps = [l.split()[1] for l in open('/proc/self/status') if l[:4] in ('CapP', 'CapE')]\n"
        "print(os.getpid(), os.getuid() == 0, {int(c, 16) for c in caps}, os.uname().nodename)\n"
        "print(sorted(int(p) for p in os.listdir('/proc') if p.isdigit()))\n"
        "print(os.listdir('/proc/self/fd')[:3])\n"
        "print({line.split(':')[2] for line in open('/proc/self/cgroup')})"
    )
    assert one(boxed, code).text == "2 False {0} sandbox\n[1, 2]\n['0', '1', '2']\n{'/\\n'}"


def test_no_network(boxed):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=2)"
        assert one(boxed, code).text == "OSError: [Errno 101] Network is unreachable"
    vsock = one(boxed, "import socket; socket.socket(socket.AF_VSOCK)")
    assert vsock.text == "OSError: [Errno 101] Network is unreachable"


@pytest.mark.parametrize(
    "function",
    [
        "unshare(0x10000000)",
        "shmget(0, 4096, 0o1666)",
        "memfd_create(b'x', 0)",
        "ptrace(0, 0, 0, 0)",
    ],
)
def test_escaping_system_calls_are_refused(boxed, function):
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"print(libc.{function}, ctypes.get_errno())"
    )
    assert one(boxed, code) == Observation("ok", "-1 1")


def test_ordinary_processes_work_inside(boxed):
    code = (
        "import subprocess, multiprocessing, sys\n"
        "print(subprocess.run(['echo', 'hi'], capture_output=True, text=True).stdout.strip())\n"
        "print(subprocess.check_output([sys.executable, '-c', 'print(6 * 7)']))\n"
        "with multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1, -2]))"
    )
    assert one(boxed, code) == Observation("ok", "hi\nb'42\\n'\n[1, 2]")


@pytest.mark.parametrize("descriptor", range(10))
def test_a_reply_cannot_be_forged(boxed, descriptor):
    """A frame written to any descriptor is at most the call's own text."""
    code = (
        "import os, struct\n"
        'reply = b\'["ok", "forged"]\'\n'
        f"try: os.write({descriptor}, struct.pack('>I', len(reply)) + reply)\n"
        "except OSError: print('refused')\n"
        "import os; os._exit(0)"
    )
    forged, after = boxed([code, "1 + 1"])
    assert forged.outcome == "killed"
    assert ("forged" in forged.text) == (descriptor in (1, 2))
    assert after == Observation("ok", "2")


def test_signals_do_not_reach_out(boxed):
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "for target in (0, -1, 1):\n"
        "    for number in (signal.SIGTERM, signal.SIGKILL):\n"
        "        if (target, number) == (0, signal.SIGKILL): continue\n"
        "        try: os.kill(target, number)\n"
        "        except ProcessLookupError: print('nobody', target)\n"
        "print('alive')"
    )
    assert boxed([code, "1"]) == [
        Observation("ok", "nobody -1\nnobody -1\nalive"),
        Observation("ok", "1"),
    ]
    assert boxed(["import os; os.kill(0, 9)", "1"]) == [
        Observation("killed", ""),
        Observation("ok", "1"),
    ]


# ---- workers and backends


@pytest.mark.parametrize(
    ("sandbox", "number"),
    [*((sandbox, signal.SIGKILL) for sandbox in [*SANDBOXES, "none"]), ("unshare", signal.SIGSTOP)],
)
def test_a_worker_that_does_not_answer_is_replaced(sandbox, number, monkeypatch):
    monkeypatch.setattr(python, "GRACE_SECONDS", 0.7)
    marker = marker_of(2)
    with python_tool(limits(sandbox, wall_seconds=3.0, output_characters=marker), 1) as call:
        call(["1"])
        settled_count(marker)
        for pid in processes(marker):
            with contextlib.suppress(ProcessLookupError):  # the first may take others along
                os.kill(pid, number)
        assert call(["1 + 1", "2 + 2"]) == [Observation("ok", "2"), Observation("ok", "4")]
    assert processes(marker) == []


def test_code_that_ends_two_workers_is_killed(monkeypatch):
    """Without a sandbox, code reaches its worker."""
    monkeypatch.setattr(python, "GRACE_SECONDS", 0.7)
    code = (
        "import os, signal\n"
        "stat = open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()\n"
        "os.kill(int(stat[1]), signal.SIGKILL)\n"  # the warm parent of the supervisor
        "os.kill(os.getppid(), signal.SIGKILL)"
    )
    with python_tool(limits("none", wall_seconds=3.0), 1) as call:
        assert call([code, "2 + 2"]) == [Observation("killed", ""), Observation("ok", "4")]


@pytest.mark.parametrize("sandbox", [*SANDBOXES, "none"])
def test_no_process_outlives_the_trainer(sandbox):
    marker = marker_of(3)
    script = (
        "from tasks.tools.python import PythonTool, python_tool\n"
        f"settings = PythonTool(**{limits(sandbox, output_characters=marker).model_dump()})\n"
        "with python_tool(settings, 2) as run:\n"
        "    print('ready', flush=True)\n"
        "    run(['import time; time.sleep(60)'] * 2)\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", script], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
    assert processes(marker)
    trainer.kill()
    trainer.communicate()
    assert until(lambda: processes(marker) == [])


def test_closing_after_an_error_ends_all_processes():
    marker = marker_of(4)
    with (
        pytest.raises(KeyError),
        python_tool(limits("unshare", output_characters=marker), 2) as call,
    ):
        call(["1"])
        raise KeyError
    assert processes(marker) == []


def test_auto_takes_a_sandbox_never_none():
    assert choose_backend("auto") == ("bubblewrap" if "bubblewrap" in SANDBOXES else "unshare")
    assert [choose_backend(sandbox) for sandbox in SANDBOXES] == SANDBOXES
    assert choose_backend("none") == "none"
    with pytest.raises(ValueError, match="docker"):
        choose_backend("docker")


def test_without_a_working_sandbox_the_tool_refuses(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"bwrap is not installed.*unshare is not installed"):
        choose_backend("auto")
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'setting up uid map: denied' >&2; exit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    with pytest.raises(RuntimeError, match=r"uid map: denied.*Remedy:.*sandbox: none"):
        choose_backend("bubblewrap")
    with pytest.raises(RuntimeError, match="auto does not work"), python_tool(limits("auto"), 1):
        pass


def test_second_backend_is_taken_if_first_fails(tmp_path, monkeypatch):
    (tmp_path / "bwrap").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert choose_backend("auto") == "unshare"


def test_a_try_that_is_killed_is_repeated_and_errors_are_forgotten(tmp_path, monkeypatch):
    wrapper, killed = tmp_path / "unshare", tmp_path / "killed"
    wrapper.write_text("#!/bin/sh\nexit 1\n")
    wrapper.chmod(0o755)
    real = shutil.which("unshare")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RuntimeError, match="unshare does not work"):
        choose_backend("unshare")
    wrapper.write_text(
        f'#!/bin/sh\n[ -e {killed} ] || {{ touch {killed}; kill -9 $$; }}\nexec {real} "$@"\n'
    )
    assert choose_backend("unshare") == "unshare"
    assert killed.exists()


def test_private_folders_among_the_programs_are_covered(monkeypatch):
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    code = f"import os; os.listdir('{standard}/wsgiref'), os.path.exists('{standard}/json')"
    monkeypatch.setenv("HF_HOME", f"{standard}/wsgiref")
    for sandbox in SANDBOXES:
        with python_tool(limits(sandbox), 1) as call:
            assert one(call, code) == Observation("ok", "([], True)")
    monkeypatch.setenv("HF_HOME", str(standard))
    with (
        pytest.raises(RuntimeError, match=f"must show .*{standard} around it holds private files"),
        python_tool(limits("unshare"), 1),
    ):
        pass


@pytest.mark.parametrize("sandbox", [*SANDBOXES, "none"])
def test_without_a_control_group_the_sums_are_limited(sandbox, monkeypatch):
    monkeypatch.setattr(control_group, "make_group", lambda limit_bytes: None)
    hog = (
        "import os, time\n"
        "for _ in range(6):\n"
        "    if os.fork() == 0:\n"
        "        x = bytearray(24 * 2 ** 20)\n"
        "        for i in range(0, len(x), 4096): x[i] = 1\n"
        "        time.sleep(9); os._exit(0)\n"
        "time.sleep(9)"
    )
    with python_tool(limits(sandbox), 1) as call:
        assert one(call, hog) == Observation("memory", "")
        assert one(call, TIME["a chain of forks"].code) == Observation("timeout", "")


def test_a_control_group_that_takes_no_process_does_no_harm(tmp_path, monkeypatch):
    def make(limit_bytes):
        (folder := tmp_path / "group").mkdir()
        members = os.open("/dev/full", os.O_WRONLY)  # every write fails
        return control_group.Group(folder, members, os.open("/dev/null", os.O_RDONLY))

    monkeypatch.setattr(control_group, "make_group", make)
    with python_tool(limits("unshare"), 1) as call:
        assert one(call, "1 + 1") == Observation("ok", "2")
    assert not (tmp_path / "group").exists()


def test_a_control_group_bounds_what_nobody_counts():
    """Where this user may make one: the kernel ends a process of the group, and it is removed."""
    group = control_group.make_group(64 * 2**20)
    if group is None:
        assert os.geteuid() != 0 or not os.access(control_group.MOUNTED, os.W_OK)
        return
    grow = "import os, sys; os.write(int(sys.argv[1]), b'0'); x = bytearray(10 ** 9)"
    process = subprocess.run(
        [sys.executable, "-c", grow, str(group.members)], pass_fds=[group.members], check=False
    )
    assert process.returncode == -signal.SIGKILL
    assert b"oom_kill 1" in os.pread(group.events, 4096, 0)
    group.close()
    group.remove()
    assert not group.folder.exists()


def test_fewer_than_one_worker_is_an_error():
    with pytest.raises(ValueError, match="at least one worker"), python_tool(limits("none"), 0):
        pass


def marker_of(test: int) -> int:
    """Return a limit of characters that no other test has, in this run or another."""
    return test * 10**8 + os.getpid()


def processes(marker: int) -> list[int]:
    """Living processes of the workers whose configuration holds ``marker``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command, state = (entry / "cmdline").read_bytes(), (entry / "stat").read_text()
            except OSError:
                continue
            sandboxed = f'"output_characters": {marker}'.encode() in command
            if sandboxed and state.rpartition(")")[2].split()[0] != "Z":
                found.append(int(entry.name))
    return found


def settled_count(marker: int) -> int:
    """How many processes there are once the number has stopped changing."""
    last = -1
    while (count := len(processes(marker))) != last:
        last = count
        time.sleep(0.1)
    return count


def until(condition, seconds: float = LONGEST) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True

"""A parent that forks for programs; the programs are real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flows.host import warm

ROOT = Path(__file__).parents[3]
FIRST = (  # what a program imports before its work is handed over
    *("flows/__init__.py", "flows/host/__init__.py", "flows/host/parents.py"),
    *("flows/host/first_check.py", "flows/host/proxies.py", "params/schema/addresses.py"),
)
ASK = "from flows.host.warm import hand_over; hand_over()\n"
TELL = ASK + (
    "import json, os, sys\n"
    "mask = os.umask(0)\n"
    "about = {'id': os.getpid(), 'arguments': sys.argv, 'folder': os.getcwd(), 'mask': mask,\n"
    "         'path': sys.path, 'name': __name__, 'file': __file__, 'input': sys.stdin.read(),\n"
    "         'here': os.environ.get('HERE'), 'away': os.environ.get('AWAY'),\n"
    "         'shared': 'fractions' in sys.modules}\n"
    "print(json.dumps(about))\n"
    "print('no fault', file=sys.stderr)\n"
    "sys.exit(7)\n"
)
SLEEP = ASK + (
    "import os, time\n"
    "print(os.getpid(), flush=True)\n"
    "try:\n"
    "    time.sleep(60)\n"
    "except KeyboardInterrupt:\n"
    "    print('interrupted', flush=True)\n"
    "    raise SystemExit(5)\n"
)


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A parent that has imported ``fractions``, and its address; AWAY is in its environment."""
    address = str(tmp_path_factory.mktemp("warm") / "socket")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWAY", "of the parent")
        patch.setenv("PYTHONPATH", str(ROOT))
        process = warm.start(address, ("fractions", "no_such_library"))
    folder = tmp_path_factory.mktemp("first")
    while not told(folder, address)[1]["shared"]:  # it takes requests while it imports
        time.sleep(0.1)
    yield process, address
    process.kill()
    process.wait()


def start(folder, text, address, *arguments, **options):
    (folder / "program.py").write_text(text)
    changes = {"PYTHONPATH": str(ROOT), warm.VARIABLE: address} | options.pop("changes", {})
    return subprocess.Popen(
        [sys.executable, "program.py", *arguments],
        **{"cwd": folder, "env": os.environ | changes, "text": True, "stdin": subprocess.PIPE},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


def told(folder, address, *arguments, **options):
    asked = start(folder, TELL, address, *arguments, **options)
    out, err = asked.communicate("a line", timeout=600)
    assert (asked.returncode, err) == (7, "no fault\n")
    return asked.pid, json.loads(out)


def gone(pid):
    try:
        process = psutil.Process(pid)
        for _ in range(600):
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
            time.sleep(0.05)
    except psutil.NoSuchProcess:
        return True
    return False


def test_the_child_has_what_the_program_has(parent, tmp_path):
    _, address = parent
    changes = {"HERE": "of the program"}
    pid, child = told(tmp_path, address, "a", "--b", changes=changes, umask=0o027)
    assert child.pop("id") != pid
    assert child.pop("shared"), "the parent has imported it"
    _, alone = told(tmp_path, warm.OFF, "a", "--b", changes=changes, umask=0o027)
    del alone["id"]
    assert not alone.pop("shared")
    assert child == alone
    assert child["here"] == "of the program" and child["away"] is None
    assert child["mask"] == 0o027 and child["input"] == "a line"


def test_code_comes_from_the_programs_own_checkout(parent, tmp_path):
    _, address = parent
    for name in FIRST:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    source = (ROOT / "flows/host/warm.py").read_text()
    (tmp_path / "flows/host/warm.py").write_text(source + "\nEDITED = True\n")
    (tmp_path / "flows/program.py").write_text(
        "import os\nfrom flows.host import warm\nprint(os.getpid(), warm.EDITED, __name__)\n"
    )
    environment = {**os.environ, warm.VARIABLE: address}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-m", "flows.program"]
    asked = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    pid, *said = asked.communicate(timeout=600)[0].split()
    assert said == ["True", "__main__"] and int(pid) != asked.pid


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONHASHSEED"])
def test_other_variables_of_libraries_hand_nothing_over(parent, tmp_path, name):
    _, address = parent
    pid, alone = told(tmp_path, address, changes={name: "3"})
    assert alone["id"] == pid and not alone["shared"]


def test_without_a_parent_the_program_runs_itself(tmp_path):
    pid, alone = told(tmp_path, str(tmp_path / "nobody"))
    assert alone["id"] == pid


def test_a_child_hands_over_what_it_starts(parent, tmp_path):
    (tmp_path / "inner.py").write_text(TELL)
    text = ASK + "import subprocess, sys\nsubprocess.run([sys.executable, 'inner.py'])\n"
    said = start(tmp_path, text, parent[1]).communicate("a line", timeout=600)[0]
    assert json.loads(said)["shared"]


def test_open_files_are_passed(parent, tmp_path):
    inside, outside = os.pipe()
    text = ASK + f"import os\nos.write({outside}, b'through the pipe')\n"
    asked = start(tmp_path, text, parent[1], pass_fds=[outside])
    os.close(outside)
    with os.fdopen(inside, "rb") as pipe:  # it ends, so nobody else holds the other side
        assert pipe.read() == b"through the pipe"
    assert asked.wait(60) == 0


def test_an_interrupt_reaches_the_child(parent, tmp_path):
    asked = start(tmp_path, SLEEP, parent[1])
    assert int(asked.stdout.readline()) != asked.pid
    asked.send_signal(signal.SIGINT)
    assert asked.communicate(timeout=600)[0] == "interrupted\n"
    assert asked.returncode == 5


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_child_that_a_signal_ends_ends_the_program_so(parent, tmp_path, number):
    asked = start(tmp_path, SLEEP, parent[1])
    os.kill(int(asked.stdout.readline()), number)
    assert asked.wait(60) == -number


def test_a_killed_program_takes_its_child_along(parent, tmp_path):
    asked = start(tmp_path, SLEEP, parent[1])
    child = int(asked.stdout.readline())
    asked.kill()
    assert gone(child)
    assert told(tmp_path, parent[1])[1]["shared"], "the parent goes on"


def test_a_killed_parent_takes_all_along(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        process = warm.start(str(tmp_path / "socket"), ())
    asked = start(tmp_path, SLEEP, str(tmp_path / "socket"))
    child = int(asked.stdout.readline())
    process.kill()
    assert asked.wait(60) == -signal.SIGKILL
    assert gone(child)
    process.wait()


def test_a_parent_ends_with_the_process_that_started_it(tmp_path):
    text = (
        "from flows.host import warm\n"
        "with warm.parent(()):\n"
        "    import os, signal, subprocess, sys\n"
        "    subprocess.run([sys.executable, '-m', 'flows.program'])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "flows").mkdir()
    for name in FIRST:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "flows/host/warm.py").write_text((ROOT / "flows/host/warm.py").read_text())
    (tmp_path / "flows/program.py").write_text("import os\nprint(os.getppid())\n")
    (tmp_path / "run.py").write_text(text)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", warm.VARIABLE)}
    ran = subprocess.run(
        [sys.executable, "run.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert gone(int(ran.stdout))


def test_a_library_with_a_thread_hands_nothing_over(tmp_path):
    """The thread would be missing in each child."""
    (tmp_path / "threaded.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
        process = warm.start(str(tmp_path / "socket"), ["threaded"])
    start(tmp_path, TELL, str(tmp_path / "socket")).communicate(
        "", timeout=600
    )  # before it is there
    pid, alone = told(tmp_path, str(tmp_path / "socket"))
    assert alone["id"] == pid
    process.kill()
    process.wait()

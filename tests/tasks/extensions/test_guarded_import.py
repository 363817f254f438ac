"""What the import of a user's file may not do to the command that imports it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.extensions import user_code_worker
from tasks.ledger import keys
from tests.waiting import wait_until

HEAD = "import os, signal, subprocess, sys, threading, time\n"
PROGRAM = """
import logging, os, random, signal, socket, sys, warnings
import numpy as np
from pathlib import Path
from tasks.extensions import guarded_import, named
def state():
    torch = sys.modules.get("torch")
    of_torch = [torch.is_grad_enabled(), torch.get_default_dtype()] if torch else []
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)]
    mask = os.umask(0)
    os.umask(mask)
    own = {name: value for name, value in os.environ.items() if name != "BEAMLINE_OWNER"}
    limits = [sys.getrecursionlimit(), socket.getdefaulttimeout(), np.geterr(), mask]
    chance = [random.getstate(), np.random.get_state()[1].tolist()]
    told = [logging.root.handlers[:], logging.root.level, warnings.filters[:], sys.stdout]
    return [os.getcwd(), handlers, own, limits, chance, told, of_torch]
if "torch" in sys.argv[2]:
    import torch
guarded_import.import_file.__defaults__ = (float(sys.argv[1]),)
before = state()
try:
    held = named.find("tools", "own/mine.py:tool").held
except ValueError as error:
    print("refused:", error)
else:
    untouched = state() == before
    print(held(), untouched, "BEAMLINE_OWNER" in os.environ)
"""


@pytest.fixture
def command(tmp_path):
    """Run a program that finds ``tool`` in a file with these lines; return what it prints."""
    (tmp_path / "own").mkdir()

    def run(lines, seconds=60):
        text = f"{HEAD}{lines}\ndef tool():\n    return 'called'\n"
        (tmp_path / "own/mine.py").write_text(text)
        environment = {**os.environ, "PYTHONPATH": str(keys.PROJECT)}
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(seconds), lines],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return run


@pytest.mark.parametrize(
    "lines",
    [
        "os.chdir('/')",
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "threading.Thread(target=time.sleep, args=(60,)).start()",
        "if os.fork(): time.sleep(0.1)",
        "os.environ.pop('BEAMLINE_OWNER')",
        "os.environ.update(CUDA_VISIBLE_DEVICES=''); os.environ.pop('PATH')",
        "signal.signal(signal.SIGALRM, print); signal.alarm(1)",
        "import random, numpy as np; random.seed(1); np.random.seed(1); np.seterr(all='raise')",
        "import socket; sys.setrecursionlimit(99999); socket.setdefaulttimeout(1); os.umask(0)",
        "import logging, warnings; logging.basicConfig(level=1); warnings.simplefilter('ignore')",
        "sys.stdout = open(os.devnull, 'w')",
        "import torch; torch.set_grad_enabled(False); torch.set_default_dtype(torch.bfloat16)",
    ],
)
def test_import_changes_nothing_here(command, lines):
    assert command(lines) == "called True False\n"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("os._exit(0)", ": the process ended (exit status 0) when the file was imported"),
        ("os.kill(os.getpid(), 9)", ": the process ended (signal 9) when the file was imported"),
        ("time.sleep(60)", ": its import takes longer than 0.3 seconds"),
        ("raise SystemExit('why')", ", line 2: cannot be imported: SystemExit: why"),
    ],
)
def test_import_that_does_not_return_is_refused(command, lines, reason):
    printed = command(lines, 0.3 if "sleep" in lines else 60)
    assert printed.startswith(f"refused: own/mine.py{reason}")


def test_fork_in_a_function_does_nothing_of_what_follows():
    """Such as an expert's, that runs within the command."""
    with pytest.raises(SystemExit, match="ours"), user_code_worker.ending_forks():
        if (child := os.fork()) == 0:
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        sys.exit("ours")


def test_no_process_of_an_import_outlives_the_command(command, tmp_path):
    started = tmp_path / "started"
    command(
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        f"print(child.pid, file=open({str(started)!r}, 'a'))"
    )
    children = started.read_text().split()
    assert len(children) == 2  # in the guarded process, and in the command
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))

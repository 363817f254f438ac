"""Run a module many times in forks of one process that has its libraries.

A new interpreter would import torch for each. ``Forks`` is for tests; ``python -m tests.forks
MODULE`` is the process.
"""

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from flows.host.parents import PR_SET_PDEATHSIG
from tasks.extensions.waiting import is_readable
from tests.checkout import warm_parent

ROOT = Path(__file__).parents[1]


class Forks:
    """A process that forks for each call of a module's ``main``; its forks end with it."""

    def __init__(self, module):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks", module],
            cwd=ROOT,
            env=os.environ | warm_parent(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, arguments, folder, output):
        """Call ``main`` with the arguments in a folder; the file gets what it prints."""
        asked = json.dumps([arguments, str(folder), str(output)])
        print(asked, file=self.process.stdin, flush=True)
        return Fork(int(self.process.stdout.readline()))

    def close(self):
        self.process.communicate()


class Fork:
    """A process that is no child of this one, as subprocess.Popen shows a child."""

    def __init__(self, pid):
        self.pid, self.descriptor = pid, os.pidfd_open(pid)

    def poll(self):
        """Return None while it runs. Its exit status is not known."""
        return 0 if is_readable(self.descriptor) else None

    def send_signal(self, number):
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, number)

    def wait(self):
        is_readable(self.descriptor, seconds=None)


def serve(module):
    """Fork for each line of standard input, and print the fork's id."""
    main = importlib.import_module(module).main
    for line in sys.stdin:
        arguments, folder, output = json.loads(line)
        if child := os.fork():
            print(child, flush=True)
            continue
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.chdir(folder)
        with Path(output).open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        main(arguments)
        os._exit(0)


if __name__ == "__main__":
    from flows.host.warm import hand_over

    hand_over()
    serve(sys.argv[1])

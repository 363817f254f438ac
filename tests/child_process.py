"""Run Python code in processes that are forked from one that has imported MLflow.

Each takes 0.1 s, where a new interpreter takes 4 s. This module itself is imported by each child,
so it imports nothing that takes time.
"""

import multiprocessing
import os
from pathlib import Path

forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["mlflow.tracking", "flows.tracking.run"])


def _execute(code, folder, environment, output):
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with Path(output).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    exec(code, {"__name__": "child"})


class Child:
    """A process of its own that runs Python code in the current folder."""

    def __init__(self, code, output):
        self._output = Path(output)
        arguments = (code, str(Path.cwd()), dict(os.environ), str(output))
        self._process = forkserver.Process(target=_execute, args=arguments)
        self._process.start()

    def wait(self):
        """Return the exit status, negative for a signal, and what it has printed."""
        self._process.join()
        return self._process.exitcode, self._output.read_text()

    def lives(self):
        """Return whether it has not ended yet."""
        return self._process.is_alive()

    def kill(self):
        """Kill it; ``wait`` returns then."""
        self._process.kill()

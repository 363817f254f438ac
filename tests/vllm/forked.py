"""Stand in for Python where a test starts vLLM: fork from a process that has vLLM imported.

vLLM takes some fifteen seconds of a processor to import. ``python -m tests.vllm.forked -m MODULE``
has flows/host/warm.py fork a process that runs the module. What a server spawns to compute is not
forked: vLLM preloads an allocator and OpenMP there.
"""

import os
import runpy
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from flows.host import warm
from tasks.engines.vllm.connection import ENVIRONMENT, ROOT

PROGRAM = "TESTS_VLLM"  # environment variable: the program that stands in for Python
LIBRARIES = (
    *("torch", "vllm", "vllm.v1.engine.llm_engine", "vllm.v1.engine.core"),
    *("vllm.v1.worker.cpu_worker", "vllm.model_executor.model_loader.default_loader"),
    *("vllm.model_executor.model_loader.reload", "vllm.model_executor.models.qwen2"),
    *("vllm.model_executor.models.transformers", "vllm.entrypoints.openai.api_server"),
)


@contextmanager
def standing_in(folder):
    """Have a process to fork from in the block; PROGRAM names what asks it."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m {__spec__.name} "$@"\n')
    program.chmod(0o755)
    with patch.dict(os.environ, ENVIRONMENT | {"PYTHONPATH": str(ROOT)}):
        process = warm.start(str(folder / "warm"), LIBRARIES)
    os.environ[PROGRAM] = str(program)
    try:
        yield
    finally:
        del os.environ[PROGRAM]
        process.kill()
        process.wait()


def environment():
    """What a program has to have in its environment to be forked."""
    address = str(Path(os.environ[PROGRAM]).with_name("warm"))
    return {**ENVIRONMENT, warm.VARIABLE: address, "PYTHONPATH": str(ROOT)}


def ask():
    """Have a program forked, and end as it does."""
    warm.hand_over()
    sys.exit("nothing forks here")


def run(arguments):
    """Be ``python -m MODULE ...``."""
    os.execve = in_place
    option, module, *rest = arguments
    assert option == "-m"
    sys.argv[:] = [option, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def in_place(program, command, environment):
    """Go on as another program of Python without importing anything anew."""
    os.environ.clear()
    os.environ.update(environment)
    run(command[1:])
    sys.exit()


if __name__ == "__main__":
    if os.environ.get(warm.FORKED) == str(os.getpid()):
        run(sys.argv[1:])
    else:
        ask()

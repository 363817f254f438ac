"""Start learner processes as torchrun does, forked from one process that has their libraries.

``python -m tests.launch_learners COUNT -m MODULE`` is a command for BEAMLINE_LAUNCH: each process
has the variables that torchrun sets, and all end when one fails. With torchrun, each would import
torch anew, which takes 5 s.
"""

import importlib
import os
import runpy
import shlex
import signal
import socket
import sys
from contextlib import contextmanager

import pytest

LIBRARIES = (
    *("torch", "torch.distributed.fsdp", "torch._dynamo", "tasks.policy.machine"),
    *("transformers.models.qwen2.modeling_qwen2", "peft", "tests.learner_processes"),
)


@contextmanager
def forked_learners(count):
    """Have ``count`` learner processes started by this module in the block."""
    from tasks.learning.learner_group import LAUNCH
    from tests.checkout import warm_parent

    command = (sys.executable, "-m", "tests.launch_learners", str(count))
    with pytest.MonkeyPatch.context() as patch:
        for name, text in (warm_parent() | {LAUNCH: shlex.join(command)}).items():
            patch.setenv(name, text)
        yield


def start(count, module):
    """Fork the processes, and exit as soon as all have ended or one has failed."""
    for name in LIBRARIES:
        importlib.import_module(name)
    from transformers import conversion_mapping

    conversion_mapping.get_checkpoint_conversion_mapping("qwen2")  # it keeps what it has compiled
    with socket.create_server(("127.0.0.1", 0), backlog=count) as listening:
        children = [fork(rank, count, listening, module) for rank in range(count)]
        store = meeting_place(listening, count)
    failed = False
    while children and not failed:
        child, status = os.wait()
        children.remove(child)
        failed = status != 0
    for child in children:
        os.kill(child, signal.SIGTERM)
    del store
    os._exit(failed)


def fork(rank, count, listening, module):
    """Return the id of a new process that runs ``module``."""
    if child := os.fork():
        return child
    host, port = listening.getsockname()
    listening.close()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the launcher's
    }
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    os._exit(0)


def meeting_place(listening, count):
    """Return the store where the processes meet. Its thread would not survive a fork."""
    from torch.distributed import TCPStore

    host, port = listening.getsockname()
    return TCPStore(
        *(host, port),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


if __name__ == "__main__":
    from flows.host.warm import hand_over

    hand_over()
    start(int(sys.argv[1]), sys.argv[3])

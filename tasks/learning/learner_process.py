"""One of several processes that learn together, as torchrun starts it (learner_group.py).

It connects to its stage, which sends functions to call. It ends when the stage closes the channel
or the process that started it ends.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from typing import Any

from params.schema.base import Machine
from tasks.learning.channel import (
    ADDRESS,
    SECRET,
    ProcessesDiedError,
    die_with_parent,
    receive,
    send,
)
from tasks.policy import world
from tasks.policy.machine import use_machine


def main() -> None:
    """Serve the stage until it closes the channel."""
    die_with_parent()
    host, _, port = os.environ.pop(ADDRESS).rpartition(":")
    with Client((host, int(port)), authkey=bytes.fromhex(os.environ.pop(SECRET))) as channel:
        send(channel, int(os.environ["RANK"]))
        with suppress(ProcessesDiedError):
            serve(channel)


def serve(channel: Connection) -> None:
    """Set up for the machine that comes first, then answer calls (function, arguments)."""
    machine: Machine = receive(channel)
    send(channel, _answer(_set_up, (machine,), {}))
    while True:
        work, arguments, named = receive(channel)
        send(channel, _answer(work, arguments, named))


def _set_up(machine: Machine) -> None:
    """Join the other processes, and share the machine's threads with those beside this one."""
    beside = int(os.environ["LOCAL_WORLD_SIZE"])
    threads = max(1, machine.threads // beside)
    world.join(machine.device)
    use_machine(machine.model_copy(update={"threads": threads}))


def _answer(work: Callable[..., Any], arguments: Any, named: Any) -> Any:
    """Return what rank 0's call returns, None in the others, or the exception."""
    try:
        result = work(*arguments, **named)
    except Exception as error:
        traceback.print_exc()
        return _picklable(error)
    return result if world.rank() == 0 else None


def _picklable(error: Exception) -> Exception:
    """Return the error, or one with its text where it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception's own code runs
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # without the others' leave-taking, which a dead one would not answer

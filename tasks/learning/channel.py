"""The channel between a stage and its learner processes: how it is found, and what it carries."""

from __future__ import annotations

import ctypes
import pickle
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ADDRESS, SECRET = "BEAMLINE_LEARNERS", "BEAMLINE_LEARNERS_KEY"  # variables that processes get
LOG = Path(".beamline/learners.log")  # output of the processes that were started last
PR_SET_PDEATHSIG = 1


class ProcessesDiedError(RuntimeError):
    """Learner processes have ended before they had done their work."""


def send(channel: Connection, message: Any) -> None:
    """Send a message with its tensors: multiprocessing's own way shares their memory instead.

    Raises ProcessesDiedError where the other side has ended.
    """
    packed = pickle.dumps(message)
    try:
        channel.send_bytes(packed)
    except OSError as error:
        raise _died(error) from error


def receive(channel: Connection) -> Any:
    """Return the next message. Raises ProcessesDiedError where the other side has ended."""
    try:
        return pickle.loads(channel.recv_bytes())
    except (EOFError, ConnectionError) as error:
        raise _died(error) from error


def _died(error: Exception) -> ProcessesDiedError:
    reason = str(error) or "its channel is closed"
    return ProcessesDiedError(
        f"a learner process has ended ({reason}; often for a lack of memory; its output is in "
        f"{LOG})"
    )


def die_with_parent() -> None:
    """Have this process killed when the one that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

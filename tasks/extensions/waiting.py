"""Wait for files, pipes and sockets of any number."""

from __future__ import annotations

import select
from typing import Protocol


class Descriptor(Protocol):
    """What has a file descriptor: a pipe, a socket."""

    def fileno(self) -> int: ...


def is_readable(source: Descriptor | int, seconds: float | None = 0) -> bool:
    """Return whether something can be read, or has ended, within ``seconds``; None: wait for it.

    ``select.select`` refuses descriptors from 1024 on, which a long process may have.
    """
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))

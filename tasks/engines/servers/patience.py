"""How long servers are waited for, and how often one that has failed is tried again."""

from __future__ import annotations

import email.utils
import time
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """Seconds that a run waits for servers. Tests take shorter ones."""

    # Without an answer of any server, from the first failure on, until the run ends: enough to
    # start a server again by hand, and to load a large policy.
    total: float = 600.0
    # Before a server that has failed is tried again: doubled with each further failure.
    first_pause: float = 1.0
    longest_pause: float = 60.0
    # Where others sample, for one that fails each time that it gets turns: a hanging one costs them
    # minutes each time.
    longest_absence: float = 3600.0
    # For a call that samples nothing, and for the first byte of one that loads weights.
    call: float = 60.0
    # For turns: without an answer of the server to any request. Servers compute requests one after
    # the other, so an answer to one shows that the others are waiting for their turn. A token takes
    # a policy of 14 billion parameters on a CPU about a second.
    turn: float = 120.0
    token: float = 1.0
    longest_turn: float = 3600.0  # whatever is answered meanwhile
    slowest: float = 10e6  # bytes of weights a second: a network of 100 Mbit/s, or a shared disk

    def pause(self, failures: int, asked_for: float = 0.0, most: float | None = None) -> float:
        """Return seconds until a server is tried again; it may have asked for longer ones.

        ``most``: in place of ``longest_pause``.
        """
        doubled = self.first_pause * 2.0 ** min(failures - 1, 30)
        return min(max(doubled, asked_for), self.longest_pause if most is None else most)

    def of_weights(self, size: int) -> float:
        """Return seconds for so many bytes of weights to be sent or loaded."""
        return self.call + size / self.slowest


PATIENCE = Patience()


def retry_after(header: str) -> float:
    """Return the seconds that a header Retry-After asks for, 0 where it says none."""
    if header.strip().isdecimal():
        return float(header.strip()[:9])
    with suppress(ValueError, TypeError, OverflowError):
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    return 0.0

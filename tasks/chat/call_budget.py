"""A budget of calls and tokens that holds over restarts and over processes.

A call reserves the most that it can cost before it is sent, and is settled with what it did cost.
Both are lines of a file. Where a process is killed in between, the reservation counts: the server
may have answered, and may charge for it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import anyio

from params.schema.chat import ChatBudget


@dataclass(frozen=True)
class Spent:
    """Calls that were sent, and their tokens."""

    calls: int = 0
    tokens: int = 0


class CallBudget:
    """Reserve and settle the calls of one account. Used by the tasks of one event loop."""

    def __init__(self, file: Path, limits: ChatBudget, section: str) -> None:
        """``file``: where the account is kept; ``section``: the recipe's, for messages."""
        self.file = file
        self.limits = limits
        self.place = section
        self._entries: dict[str, Spent] = {}  # by call: reserved, or settled
        self._read = 0  # bytes of the file
        self._open = 0  # calls of this process that are not settled
        self._settled = anyio.Event()

    @property
    def spent(self) -> Spent:
        """Return what the account has spent or reserved so far."""
        with self._locked():
            return self._total()

    async def reserve(self, tokens: int) -> str:
        """Reserve a call of at most so many tokens; return the name to settle it with.

        Waits for open calls where their reservations are in the way. Raises RuntimeError, which
        names setting, amounts and remedy, where the budget has no room for the call.
        """
        while True:
            with self._locked() as file:
                over = self._over(Spent(1, tokens))
                if not over:
                    call = secrets.token_hex(6)
                    self._write(file, call, Spent(1, tokens))
                    self._open += 1
                    return call
                waited = self._settled
            if not self._open:
                raise RuntimeError(over)
            await waited.wait()

    def settle(self, call: str, spent: Spent | None) -> None:
        """Put down what a call has cost; None: unknown, so what was reserved counts."""
        self._open -= 1
        if spent is not None:
            with self._locked() as file:
                self._write(file, call, spent)
        self._settled.set()
        self._settled = anyio.Event()

    def _total(self) -> Spent:
        entries = self._entries.values()
        return Spent(sum(each.calls for each in entries), sum(each.tokens for each in entries))

    def _over(self, more: Spent) -> str:
        """Return why the budget has no room for a call, or ""."""
        total = self._total()
        for name in ("calls", "tokens"):
            most, so_far = getattr(self.limits, name), getattr(total, name)
            if most is not None and so_far + getattr(more, name) > most:
                return (
                    f"{self.place}.budget.{name} = {most} has no room for the next call: {so_far} "
                    f"{name} are spent and the call may need {getattr(more, name)}; all answers so "
                    f"far are kept. Raise {self.place}.budget.{name}, or remove {self.file} to "
                    "count from 0, and run the command again"
                )
        return ""

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """Open the file, for this process alone, and read what others have put down."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(self._read)
            new = file.read()
            if new and not new.endswith(b"\n"):  # the end of a writer that was killed
                file.write(b"\n")
            for line in new.splitlines():
                self._note(line)
            self._read = file.seek(0, os.SEEK_END)
            yield file

    def _note(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            self._entries[entry["call"]] = Spent(entry["calls"], entry["tokens"])
        except (ValueError, KeyError, TypeError):
            return  # half a line

    def _write(self, file: BinaryIO, call: str, spent: Spent) -> None:
        line = json.dumps({"call": call, **vars(spent)}).encode() + b"\n"
        file.write(line)
        file.flush()
        self._entries[call] = spent
        self._read += len(line)

"""Folders that wait to be sent, and the thread that sends them while the run computes.

A folder waits once, however often it is added, and is sent as it is when its turn comes. So an
order of changes needs no order of jobs: what was retired before it was sent is sent without the
retired artifacts. Whoever changes a folder takes it out first (``withdraw``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

MOST = 4  # folders that wait; a run that adds another one waits: it stays ahead by an iteration


class UploadQueue:
    """Folders to be sent by ``send``, which returns False where the mirror is unreachable.

    Such folders no longer wait, and hold up nobody. They wait again once one has been sent.
    """

    def __init__(self, send: Callable[[Path], bool]) -> None:
        self.send = send
        self.changed = threading.Condition()  # guards what follows
        self.waiting: dict[Path, None] = {}  # in order
        self.unsent: dict[Path, None] = {}  # because the mirror was unreachable
        self.current: Path | None = None
        self.thread: threading.Thread | None = None

    def add(self, folder: Path) -> None:
        """Have a folder sent; wait while MOST others are waiting."""
        with self.changed:
            if not self.thread:  # a daemon: a run that is interrupted does not wait for the network
                self.thread = threading.Thread(target=self._work, name="uploads", daemon=True)
                self.thread.start()
            self.changed.wait_for(lambda: folder in self.waiting or len(self.waiting) < MOST)
            self.unsent.pop(folder, None)
            self.waiting[folder] = None
            self.changed.notify_all()

    def withdraw(self, folder: Path) -> None:
        """Take out a folder and those below it; return once none of them is being sent."""
        with self.changed:
            for folders in (self.waiting, self.unsent):
                for each in [each for each in folders if each.is_relative_to(folder)]:
                    del folders[each]
            self.changed.notify_all()
            self.changed.wait_for(
                lambda: self.current is None or not self.current.is_relative_to(folder)
            )

    def retry(self) -> None:
        """Have the folders sent that could not be."""
        for folder in list(self.unsent):
            self.add(folder)

    def wait(self, seconds: float) -> int:
        """Wait until all that waits has been sent, or some seconds; return how many are left."""
        with self.changed:
            self.changed.wait_for(lambda: not self._left(), seconds)
            return self._left()

    def _left(self) -> int:
        return len(self.waiting) + (self.current is not None)

    def _work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting)
                self.current = next(iter(self.waiting))
                del self.waiting[self.current]
                self.changed.notify_all()
            sent = self.send(self.current)
            with self.changed:
                if sent:
                    self.waiting |= self.unsent
                    self.unsent.clear()
                else:
                    self.unsent[self.current] = None
                self.current = None
                self.changed.notify_all()

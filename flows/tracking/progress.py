"""Progress of long work: a bar in a terminal, a line a minute elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

LINE_EVERY = 60.0  # seconds, where no terminal is looking


class Progress:
    """How far some work has come. ``note`` shows values beside it."""

    def __init__(self, name: str, total: int, done: int = 0) -> None:
        self.name, self.total, self.done = name, total, done
        self.values: dict[str, Any] = {}
        self.spoke = time.monotonic()
        self.bar: tqdm[Any] | None = (
            tqdm(desc=name, total=total, initial=done) if sys.stderr.isatty() else None
        )

    def advance(self, count: int) -> None:
        """``count`` more units are done."""
        self.done += count
        if self.bar is not None:
            self.bar.update(count)
        elif time.monotonic() - self.spoke >= LINE_EVERY:
            self._say()

    def reach(self, done: int, values: Mapping[str, float]) -> None:
        """Set how much is done, with the newest values of some numbers."""
        self.note(**values)
        self.advance(done - self.done)

    def note(self, **values: float) -> None:
        """Show the newest values of some numbers."""
        self.values |= {name: f"{value:.3g}" for name, value in values.items()}
        if self.bar is not None:
            self.bar.set_postfix(self.values, refresh=False)

    def close(self) -> None:
        """The work has ended."""
        if self.bar is not None:
            self.bar.close()
        else:
            self._say()

    def _say(self) -> None:
        self.spoke = time.monotonic()
        values = "".join(f", {name} {value}" for name, value in self.values.items())
        print(f"{self.name}: {self.done} of {self.total}{values}", flush=True)

"""Show the progress of long work: a bar in a terminal, a line a minute elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

LINE_EVERY = 60.0  # seconds, without a terminal


class Progress:
    """The progress of some work out of ``total`` units, with values that ``note`` adds.

    ``unit``: what is counted, in the plural.
    """

    def __init__(self, name: str, total: int, done: int = 0, *, unit: str = "") -> None:
        self.name, self.total, self.done, self.unit = name, total, done, unit
        self.values: dict[str, Any] = {}
        self.last_line = time.monotonic()
        self.bar: tqdm[Any] | None = (
            tqdm(desc=name, total=total, initial=done) if sys.stderr.isatty() else None
        )

    def advance(self, count: int) -> None:
        """Add ``count`` finished units."""
        self.done += count
        if self.bar is not None:
            self.bar.update(count)
        elif time.monotonic() - self.last_line >= LINE_EVERY:
            self._print_line()

    def reach(self, done: int, values: Mapping[str, float]) -> None:
        """Set the number of finished units, with the newest values of some numbers."""
        self.note(**values)
        self.advance(done - self.done)

    def note(self, **values: float) -> None:
        """Show the newest values of some numbers."""
        self.values |= {name: f"{value:.3g}" for name, value in values.items()}
        if self.bar is not None:
            self.bar.set_postfix(self.values, refresh=False)

    def write(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self.bar is not None:
            self.bar.write(text)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Close the bar, or print the last line.

        Work of which nothing was counted is reused: it was done by an earlier call.
        """
        if self.bar is not None:
            self.bar.leave = self.done > 0
            self.bar.close()
        if not self.done and self.total:
            many = f"all {self.total} {self.unit}" if self.total > 1 else f"1 {self.unit}"
            print(f"{self.name}: {many.rstrip()} done before, and reused", flush=True)
        elif self.bar is None:
            self._print_line()

    def _print_line(self) -> None:
        self.last_line = time.monotonic()
        values = "".join(f", {name} {value}" for name, value in self.values.items())
        unit = f" {self.unit}" if self.unit else ""
        print(f"{self.name}: {self.done} of {self.total}{unit}{values}", flush=True)

"""Show the progress of long work: a bar in a terminal, a line now and then elsewhere.

Lines come soon at first, so that one sees what a step takes and how long all will take, and later
one a minute.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

LINES = (
    "beamline.lines"  # logger of lines for people; flows/workers/run_log.py sends them to Prefect
)
SOON, LINE_EVERY = 5.0, 60.0  # seconds between two lines, at least and at most
SHARE = 0.1  # of the time so far, after which there is another line


class Progress:
    """The progress of some work out of ``total`` units, with values that ``note`` adds.

    ``unit``: what is counted, in the plural.
    """

    def __init__(self, name: str, total: int, done: int = 0, *, unit: str = "") -> None:
        self.name, self.total, self.done, self.unit = name, total, done, unit
        self.values: dict[str, Any] = {}
        self.began = self.last_line = time.monotonic()
        self.done_before = self.done_in_line = done
        self.bar: tqdm[Any] | None = (
            tqdm(desc=name, total=total, initial=done)
            if sys.stdout.isatty() and sys.stderr.isatty()  # else what is piped has no lines
            else None
        )

    def advance(self, count: int) -> None:
        """Add ``count`` finished units."""
        self.done += count
        if self.bar is not None:
            self.bar.update(count)
        if self._is_due():
            self._say(self._line())

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
        else:
            self._say(self._line())

    def _is_due(self) -> bool:
        """Return whether it is time for another line; the last one is that of ``close``."""
        if self.done >= self.total:
            return False
        now = time.monotonic()
        soon = max(SOON, SHARE * (now - self.began))
        wait = min(soon if self.done > self.done_in_line else LINE_EVERY, LINE_EVERY)
        return now - self.last_line >= wait

    def _say(self, line: str) -> None:
        """Print a line; a bar shows the same in place, so that with one it is for the log alone."""
        if self.bar is None:
            print(line, flush=True)
        else:
            logging.getLogger(LINES).info(line)

    def _line(self) -> str:
        self.last_line, self.done_in_line = time.monotonic(), self.done
        values = "".join(f", {name} {value}" for name, value in self.values.items())
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.name}: {self.done} of {self.total}{unit}{values}{self._time()}"

    def _time(self) -> str:
        """Return the time that is left, at the speed so far, or what all took; "" for seconds."""
        passed, done = time.monotonic() - self.began, self.done - self.done_before
        if passed < SOON or not done:
            return ""
        left = passed / done * max(self.total - self.done, 0)
        return f", about {duration(left)} left" if left else f", in {duration(passed)}"


def duration(seconds: float) -> str:
    """Return a time in words, to two digits or so: 40 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"

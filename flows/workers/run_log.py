"""Show in the log of a flow run, in Prefect, what its process prints."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, TextIO

from flows.tracking.progress import LINES

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun
    from prefect.states import State

WARNERS = ("flows", "tasks")  # loggers whose warnings go there, too


class CopiedOutput:
    """A text stream whose whole lines also go to a logger."""

    def __init__(self, stream: TextIO, logger: logging.Logger) -> None:
        self._stream, self._logger, self._rest = stream, logger, ""

    def write(self, text: str) -> int:
        """Write to the stream; log the lines that have ended."""
        written = self._stream.write(text)
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(str.strip, lines):
            self._logger.info(line)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def copied_output() -> Iterator[None]:
    """Copy what the block prints to the log of its flow run, once ``begin`` knows it.

    Prefect sends logs in batches, from a thread, and drops them where the server is away.
    """
    logger = logging.getLogger(LINES)
    with redirect_stdout(CopiedOutput(sys.stdout, logger)):
        try:
            yield
        finally:
            for name in (LINES, *WARNERS):
                _forget(logging.getLogger(name))


def begin(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Send the lines of this process to the log of a flow run: a hook for ``on_running``."""
    from prefect.logging.handlers import APILogHandler

    def add_run(record: logging.LogRecord) -> bool:
        record.flow_run_id = str(flow_run.id)  # threads do not know it
        return True

    for name, level in ((LINES, logging.INFO), *((name, logging.WARNING) for name in WARNERS)):
        handler = APILogHandler(level)
        handler.addFilter(add_run)
        logger = logging.getLogger(name)
        _forget(logger)
        logger.addHandler(handler)
    lines = logging.getLogger(LINES)
    lines.setLevel(logging.INFO)
    lines.propagate = False  # they are in the terminal


def _forget(logger: logging.Logger) -> None:
    from prefect.logging.handlers import APILogHandler

    for handler in [one for one in logger.handlers if isinstance(one, APILogHandler)]:
        logger.removeHandler(handler)

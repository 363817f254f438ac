"""An environment that counts the seconds of its acts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tasks.environments.contract import OpenEnvironment, Session
from tasks.trees.tree import Call, Observation, Question


@dataclass(frozen=True)
class Stopwatch:
    """An environment, and the seconds that each round of its acts has taken."""

    environment: OpenEnvironment
    seconds: list[float] = field(default_factory=list)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Open a session of the environment that is timed."""
        with self.environment.session() as opened:
            yield TimedSession(opened, self.seconds)


@dataclass(frozen=True)
class TimedSession:
    """A session of an environment whose seconds are added to a list. See ``Session``."""

    inner: Session
    seconds: list[float]

    def open(self, tasks: Sequence[Question]) -> list[tuple[int, Observation | None]]:
        with self._timed():
            return self.inner.open(tasks)

    def fork(self, handle: int, acts: int) -> int:
        return self.inner.fork(handle, acts)

    def act(self, moves: Sequence[tuple[int, Call]]) -> list[Observation]:
        with self._timed():
            return self.inner.act(moves)

    def end(self, endings: Sequence[tuple[int, str]]) -> list[Observation | None]:
        with self._timed():
            return self.inner.end(endings)

    def solve(self, handles: Sequence[int]) -> list[Call | None]:
        return self.inner.solve(handles)

    def close(self, handle: int) -> None:
        self.inner.close(handle)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds.append(time.perf_counter() - began)

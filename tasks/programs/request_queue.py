"""Who waits for an answer and who works: it decides when a round of answers is sampled.

A round begins when all episodes that run wait for an answer, so that what is sampled together does
not depend on who was faster. Those who let the others wait too long are left out of a round.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from tasks.programs.asking import Asked
from tasks.programs.episodes import ProgramEpisode, SampledAnswer
from tasks.programs.messages import RefusedError

# Seconds in which further requests of the same moment join a round: of a program that has asked
# for one answer at a time so far, and of one that asks for several.
SETTLE, SETTLE_PARALLEL = 0.003, 0.05
LOOK = 0.2  # seconds between two looks at those who work too long


@dataclass(eq=False)
class WaitingRequest:
    """A request that waits for its answers."""

    episode: ProgramEpisode
    asked: Asked
    answered: Future[list[SampledAnswer]] = field(default_factory=Future)

    async def answers(self) -> list[SampledAnswer]:
        """Wait for the answers. Raises RefusedError where there are none."""
        return await asyncio.shield(asyncio.wrap_future(self.answered))


@dataclass
class WorkTime:
    """How long the program of an episode has worked by itself."""

    worked: float = 0.0  # seconds
    since: float | None = None  # when it began to; None: it waits, or has not started
    waiting: int = 0  # its requests that wait

    def seconds(self, now: float) -> float:
        return self.worked + (now - self.since if self.since is not None else 0.0)


class RequestQueue:
    """The episodes of a batch, in order, of which some run side by side."""

    def __init__(
        self, episodes: Sequence[ProgramEpisode], lanes: int, patience: float, together: bool = True
    ) -> None:
        """``together``: a round waits for all who run; else it takes whoever waits."""
        self.together = together
        self.left = deque(episodes)
        self.lanes, self.patience = lanes, patience
        self.running: dict[int, tuple[ProgramEpisode, WorkTime]] = {}  # by id of the object
        self.requests: list[WaitingRequest] = []
        self.changed = threading.Condition()
        self.moved = time.monotonic()  # when an episode last asked, began or ended
        self.parallel = False  # an episode has asked for two answers at once
        self.early = 0  # rounds that were begun without some who worked
        self.idle = 0.0  # seconds in which nothing was sampled

    def begin(self, more: Sequence[ProgramEpisode] = ()) -> list[ProgramEpisode]:
        """Add episodes; count the next as running, as far as there are lanes, and return them."""
        with self.changed:
            self.left.extend(more)
            return self._more()

    def started(self, episode: ProgramEpisode) -> None:
        """Count the seconds of an episode's program from now on."""
        with self.changed:
            held = self.running.get(id(episode))
            if held is not None:
                held[1].since = self.moved = time.monotonic()

    def _more(self) -> list[ProgramEpisode]:
        begun = []
        while len(self.running) < self.lanes and self.left:
            episode = self.left.popleft()
            self.running[id(episode)] = (episode, WorkTime())
            begun.append(episode)
            self.moved = time.monotonic()
        return begun

    def end(self, episode: ProgramEpisode) -> list[ProgramEpisode]:
        """Count an episode as ended; return those that are to be started in its place."""
        with self.changed:
            self.running.pop(id(episode), None)
            dropped = [request for request in self.requests if request.episode is episode]
            self.requests = [each for each in self.requests if each.episode is not episode]
            begun = self._more()
            self.moved = time.monotonic()
            self.changed.notify_all()
        for request in dropped:
            request.answered.set_exception(RefusedError("the episode has ended", 410, "ended"))
        return begun

    def put(self, request: WaitingRequest) -> None:
        """Have a request wait. Raises RefusedError where its episode has ended."""
        with self.changed:
            held = self.running.get(id(request.episode))
            if held is None:
                raise RefusedError("the episode has ended", 410, "ended")
            work, now = held[1], time.monotonic()
            if work.since is not None:
                work.worked, work.since = work.worked + now - work.since, None
            work.waiting += 1
            self.parallel = self.parallel or work.waiting > 1
            self.moved = now
            self.requests.append(request)
            self.changed.notify_all()

    def take(self) -> list[WaitingRequest] | None:
        """Wait for the next round: return its requests, [] to look around, None at the end."""
        began = time.monotonic()
        with self.changed:
            self.changed.wait_for(lambda: self._ready() or not self.running, timeout=LOOK)
            if not self.running:
                return None
            if self.requests and self._ready():
                self._settle()
            late = bool(self.requests) and time.monotonic() - self.moved > self.patience
            if not (self._ready() or late):
                self.idle += time.monotonic() - began
                return []
            self.early += not self._ready()
            taken, self.requests = self.requests, []
        self.idle += time.monotonic() - began
        return taken

    def _settle(self) -> None:
        """Wait until no further request comes, so that those of one moment are in one round."""
        while self.changed.wait(SETTLE_PARALLEL if self.parallel else SETTLE):
            pass

    def _ready(self) -> bool:
        if not self.requests:
            return False
        return not self.together or all(work.waiting for _, work in self.running.values())

    def give(self, request: WaitingRequest, answers: list[SampledAnswer] | RefusedError) -> None:
        """Answer a request; its program works on."""
        with self.changed:
            held = self.running.get(id(request.episode))
            if held is not None:
                work = held[1]
                work.waiting -= 1
                if not work.waiting:
                    work.since = time.monotonic()
        if isinstance(answers, RefusedError):
            request.answered.set_exception(answers)
        else:
            request.answered.set_result(answers)

    def late(self, seconds: float) -> list[ProgramEpisode]:
        """Return the episodes whose programs have worked for longer than ``seconds``."""
        now = time.monotonic()
        with self.changed:
            return [e for e, work in self.running.values() if work.seconds(now) > seconds]

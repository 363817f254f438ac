"""Sample from several servers that hold the same policy.

A tree stays with the server that sampled its first turn, which holds its prefixes. Where a server
fails, its trees move to the others, and turns without an answer are sampled again: each turn has a
seed of its own, so the result does not depend on the server. A server that has failed is tried
again after a pause, which doubles until it answers; it gets the current weights unless it has them,
and what it has is held against the learner's before it samples. Where no server answers any more,
the run ends after ``Patience.total`` seconds.
"""

from __future__ import annotations

import concurrent.futures
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tasks.engines.servers.client import (
    EngineServer,
    Failure,
    ServerFailedError,
    StaleWeightsError,
    UnfitRequestError,
)
from tasks.engines.servers.patience import PATIENCE, Patience
from tasks.engines.servers.weights_check import ServedPolicy
from tasks.engines.turns import Drawn, EngineDiedError, TurnRequest

STALE = 3  # times that a server may answer with other weights after it has got the current ones
LONGEST_SLEEP = 1.0  # seconds until servers are looked at again: another thread may have tried them
Describe = Callable[[], ServedPolicy]  # what servers need of a policy; computed where it is new


@dataclass(frozen=True)
class Failing:
    """What is known of a server that has failed since it last answered a request for turns."""

    times: int
    with_turns: int  # of these, when it had turns to sample
    since: float  # the last time, by time.monotonic
    pause: float  # seconds until it is tried again
    reason: Failure


@dataclass
class LongWait:
    """A call that waits for servers: since when none has answered, by time.monotonic."""

    since: float | None = None


class Fleet:
    """Several servers of one kind of engine. Several threads may call its methods."""

    def __init__(self, addresses: Sequence[str], kind: str, patience: Patience = PATIENCE) -> None:
        """Make ready to connect. Raises ValueError for an address with a password."""
        self.kind, self.patience = kind, patience
        self.servers = [EngineServer(address, kind, patience) for address in addresses]
        self.policy: ServedPolicy | None = None  # the current one
        self.up: set[EngineServer] = set()  # those that have its weights, and answer
        self.holding: set[EngineServer] = set()  # those that have got its weights, and may fail
        self.proven: set[EngineServer] = set()  # those that were up once
        self.failing: dict[EngineServer, Failing] = {}
        self.loading: dict[EngineServer, tuple[ServedPolicy, Future[None]]] = {}
        self.stale: Counter[EngineServer] = Counter()
        self.homes: dict[bytes, EngineServer] = {}  # tree -> the server that holds its prefixes
        self.answered = 0.0  # when a server has last answered a request for turns, time.monotonic
        self.lock = threading.RLock()  # for all of these

    def load(self, describe: Describe, version: str) -> None:
        """Give servers the weights ``version`` unless they have them.

        Waits until one has them, and for others that have not failed yet. Raises EngineDiedError if
        there is none for too long, and ValueError if none is a server of this run.
        """
        self._await_a_server(describe, version, LongWait())

    def sample(self, turns: Sequence[TurnRequest], describe: Describe, version: str) -> list[Drawn]:
        """Sample turns with the weights ``version``, loaded where others are (see ``load``).

        The turns of a server that fails meanwhile are sampled on others. Raises UnfitRequestError
        for a request that all of them refuse.
        """
        results: dict[int, Drawn] = {}
        wait, refusing = LongWait(), set[EngineServer]()
        while len(results) < len(turns):
            before = len(results)
            left = {index: turns[index].tree for index in range(len(turns)) if index not in results}
            for server, indices, answers in self._round(turns, left, describe, version, wait):
                error = self._take(server, zip(indices, answers, strict=True), results)
                if isinstance(error, UnfitRequestError):
                    refusing.add(server)
                    self._hand_on(error, refusing)
            if len(results) == before:
                self._begin(wait)
        return [results[index] for index in range(len(turns))]

    def _round(
        self,
        turns: Sequence[TurnRequest],
        left: dict[int, bytes],
        describe: Describe,
        version: str,
        wait: LongWait,
    ) -> list[tuple[EngineServer, list[int], list[Drawn | Failure]]]:
        """Ask each server for its part of the turns that are left; return what each answers."""
        policy = self._await_a_server(describe, version, wait)
        with self.lock:  # another thread may have taken all of them down, or changed the policy
            parts = self._dealt(left) if self.up and self.policy is policy else {}
        how = policy.version, policy.ids, policy.pieces
        with ThreadPoolExecutor(max(1, len(parts))) as pool:
            waiting = [
                (server, indices, pool.submit(server.sample, [turns[i] for i in indices], *how))
                for server, indices in parts.items()
            ]
        return [(server, indices, answers.result()) for server, indices, answers in waiting]

    def _hand_on(self, error: UnfitRequestError, refusing: set[EngineServer]) -> None:
        """Raise the error of a server that refuses a request where no other one can be asked."""
        with self.lock:
            if not self.up - refusing:
                raise error

    def _dealt(self, trees: dict[int, bytes]) -> dict[EngineServer, list[int]]:
        """Return server -> indices of its turns. ``trees``: index -> tree.

        A tree without a server that is up goes to the one with the fewest trees.
        """
        parts: dict[EngineServer, list[int]] = {}
        load = Counter(server for server in self.homes.values() if server in self.up)
        for index, tree in trees.items():
            if self.homes.get(tree) not in self.up:
                order = [server for server in self.servers if server in self.up]
                self.homes[tree] = min(order, key=lambda server: load[server])
                load[self.homes[tree]] += 1
            parts.setdefault(self.homes[tree], []).append(index)
        return parts

    def _take(
        self,
        server: EngineServer,
        answers: Iterable[tuple[int, Drawn | Failure]],
        results: dict[int, Drawn],
    ) -> Failure | None:
        """Put a server's answers into ``results``; one that is missing takes the server down."""
        missing, before = None, len(results)
        for index, drawn in answers:
            if isinstance(drawn, Exception):
                missing = drawn
            else:
                results[index] = drawn
        with self.lock:
            if len(results) > before:
                self.answered = time.monotonic()
                self.failing.pop(server, None)
            if missing:
                self._take_down(server, missing)
        return missing

    def _take_down(self, server: EngineServer, error: Failure) -> None:
        """Note that a server is down. Raises RuntimeError for the last one, if it stays stale."""
        if server not in self.up:
            return
        self.up.discard(server)
        self._fail(server, error, "its unfinished turns are sampled again", with_turns=True)
        self.stale[server] += isinstance(error, StaleWeightsError)
        if self.stale[server] > STALE and not self.up:
            raise RuntimeError(
                f"{error}, {self.stale[server]} times since it got these: does another run use it?"
            )

    def _fail(
        self, server: EngineServer, error: Failure, consequence: str, with_turns: bool = False
    ) -> None:
        """Note a failure of a server, and say it where it is new or often enough to be told."""
        last = self.failing.get(server)
        times = last.times + 1 if last else 1
        turns = (last.with_turns if last else 0) + with_turns
        most = self.patience.longest_absence if with_turns and self.up else None
        failures = turns if with_turns else times
        pause = self.patience.pause(failures, getattr(error, "pause", 0.0), most)
        self.failing[server] = Failing(times, turns, time.monotonic(), pause, error)
        if not times & (times - 1) or not last or str(error) != str(last.reason):
            again = f"it is tried again in {pause:.3g} s (failure {times})"
            print(f"{error}: {consequence}; {again}", flush=True)

    # ------------------------------------------------------------ waiting

    def _await_a_server(self, describe: Describe, version: str, wait: LongWait) -> ServedPolicy:
        """Return the policy once a server is up, and the others are or have failed."""
        while True:
            with self.lock:
                policy = self._renew(describe, version)
                self._collect()
                self._begin_loads(policy)
                fresh = [load for one, (_, load) in self.loading.items() if one not in self.failing]
                self._check_patience(wait)
                if self.up and not fresh:
                    return policy
                waiting = fresh or [load for _, load in self.loading.values()]
                pause = self._pause(wait)
            if waiting:
                concurrent.futures.wait(waiting, pause, concurrent.futures.FIRST_COMPLETED)
            else:
                time.sleep(pause)

    def _renew(self, describe: Describe, version: str) -> ServedPolicy:
        """Return the current policy, after making it the current one."""
        if self.policy is None or self.policy.version != version:
            self.policy = describe()
            self.up, self.holding, self.homes = set(), set(), {}
            self.stale.clear()
        return self.policy

    def _begin_loads(self, policy: ServedPolicy) -> None:
        """Begin to give the weights to the servers that are down and due."""
        now = time.monotonic()
        for server in self.servers:
            is_down = server not in self.up and server not in self.loading
            if is_down and self._due(server) <= now:
                load = _started(_bring_up, server, policy, server in self.holding)
                self.loading[server] = policy, load

    def _due(self, server: EngineServer) -> float:
        """Return when a server is tried again, by time.monotonic: soon where no other one is up."""
        if not (one := self.failing.get(server)):
            return 0.0
        most = math.inf if self.up else self.patience.longest_pause
        return one.since + min(one.pause, most)

    def _collect(self) -> None:
        """Note which servers have the weights by now, and which have failed."""
        for server, (policy, load) in list(self.loading.items()):
            if not load.done():
                continue
            del self.loading[server]
            error = load.exception()
            if isinstance(error, ServerFailedError | UnfitRequestError | ValueError):
                self.holding.discard(server)
                self._fail(server, error, "it gets no turns")
            elif error:
                raise error
            elif policy is self.policy:
                for servers in (self.up, self.holding, self.proven):
                    servers.add(server)

    def _pause(self, wait: LongWait) -> float:
        """Return seconds until a server is due, or the wait is over."""
        busy = self.up | set(self.loading)
        events = [self._due(server) for server in self.failing if server not in busy]
        if wait.since is not None:
            events.append(wait.since + self.patience.total)
        left = min(events, default=time.monotonic() + LONGEST_SLEEP) - time.monotonic()
        return min(max(0.001, left), LONGEST_SLEEP)

    def _begin(self, wait: LongWait) -> None:
        """Note that a call has had no answer; an answer to another one ends that."""
        with self.lock:
            if wait.since is None or wait.since < self.answered:
                wait.since = time.monotonic()

    def _check_patience(self, wait: LongWait) -> None:
        """Raise where no server has answered for too long, or each is none of this run's."""
        if not self.up and self.failing:
            self._begin(wait)
        reasons = [self._reason(server) for server in self.servers]
        if not (self.up or self.loading or self.proven) and self._are_strangers():
            raise ValueError("; ".join(reasons))
        waited = 0.0 if wait.since is None else time.monotonic() - wait.since
        if waited > self.patience.total and (wait.since or 0.0) > self.answered:
            raise EngineDiedError(
                f"no server has answered a request for turns for {waited:.3g} s: "
                f"{'; '.join(reasons)}. Start servers again with `make serve`, or name others in "
                "engine.servers or BEAMLINE_SERVERS; then start the run again, which goes on "
                "where it was"
            )

    def _are_strangers(self) -> bool:
        """Return whether each server was asked, and is of another kind or has another token."""
        reasons = [self.failing[one].reason for one in self.servers if one in self.failing]
        strangers = [one for one in reasons if isinstance(one, ValueError)]
        return len(strangers) == len(self.servers)

    def _reason(self, server: EngineServer) -> str:
        """Return why a server is down, and how often it has been tried."""
        if one := self.failing.get(server):
            return f"{one.reason} ({one.times} failure{'s' * (one.times > 1)})"
        return f"engine.servers: {server.name}: it has not answered yet"


def _bring_up(server: EngineServer, policy: ServedPolicy, holding: bool) -> None:
    """Have a server hold a policy, and prove it. Raises as the methods of the server.

    ``holding``: it has got the weights before, and has failed since. One whose weights are not the
    learner's gets them once more.
    """
    if not holding:
        server.load(policy.folder, policy.version)
    try:
        server.check_weights(policy)
    except StaleWeightsError:
        server.load(policy.folder, policy.version)
        server.check_weights(policy)


def _started(work: Callable[..., object], *arguments: object) -> Future[None]:
    """Return the result to come of a call in a thread that does not outlive this process."""
    result: Future[None] = Future()

    def run() -> None:
        try:
            work(*arguments)
            result.set_result(None)
        except BaseException as error:  # the one who waits raises it
            result.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return result

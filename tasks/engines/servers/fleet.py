"""Sample from several servers that hold the same policy.

A tree stays with the server that sampled its first turn, which holds its prefixes. Where a server
dies, its trees move to the others, and turns without an answer are sampled again: each turn has a
seed of its own, so the result does not depend on the server. A server that is back gets the current
weights before it samples. Every answer carries the version of the weights that gave it; one by
other weights is thrown away, and its server gets the current ones first.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tasks.engines.servers.client import EngineServer, StaleWeightsError
from tasks.engines.turns import Drawn, EngineDiedError, TurnRequest

SERVER_WAIT, RETRY_PAUSE = 600.0, 5.0  # seconds for a server to answer, and between two attempts
STALE = 3  # times that a server may answer with other weights after it has got the current ones


class Fleet:
    """Several servers of one kind of engine. Several threads may call its methods."""

    def __init__(self, addresses: Sequence[str], kind: str) -> None:
        """Make ready to connect. Raises ValueError for an address with a password."""
        self.servers = [EngineServer(address, kind) for address in addresses]
        self.up: set[EngineServer] = set()  # those that have the current weights
        self.tried: dict[
            EngineServer, float
        ] = {}  # when one that is down was tried, time.monotonic
        self.stale: Counter[EngineServer] = Counter()
        self.homes: dict[bytes, EngineServer] = {}  # tree -> the server that holds its prefixes
        self.folder, self.version = Path(), ""
        self.lock = threading.RLock()  # for all of these

    def load(self, folder: Callable[[], Path], version: str) -> None:
        """Load the weights ``version`` unless they are there; ``folder`` returns their folder.

        Waits until one server has them. Raises EngineDiedError if none has in SERVER_WAIT.
        """
        with self.lock:
            if version != self.version:
                self.folder = folder().absolute()
                self.up, self.tried, self.homes = set(), {}, {}
                self.stale.clear()
                self.version = version
            self._await_a_server()

    def sample(
        self, turns: Sequence[TurnRequest], folder: Callable[[], Path], version: str
    ) -> list[Drawn]:
        """Sample turns with the weights ``version``, loaded where others are (see ``load``).

        The turns of a server that dies meanwhile are sampled on others.
        """
        results: dict[int, Drawn] = {}
        while len(results) < len(turns):
            left = [index for index in range(len(turns)) if index not in results]
            with self.lock:
                self.load(folder, version)
                parts = self._dealt({index: turns[index].tree for index in left})
            with ThreadPoolExecutor(len(parts)) as pool:
                waiting = [
                    pool.submit(server.sample, [turns[index] for index in indices], version)
                    for server, indices in parts.items()
                ]
            for (server, indices), drawn in zip(parts.items(), waiting, strict=True):
                self._take(server, zip(indices, drawn.result(), strict=True), results)
        return [results[index] for index in range(len(turns))]

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
        answers: Iterable[tuple[int, Drawn | EngineDiedError]],
        results: dict[int, Drawn],
    ) -> None:
        """Put a server's answers into ``results``; one that is missing takes the server down."""
        missing = None
        for index, drawn in answers:
            if isinstance(drawn, EngineDiedError):
                missing = drawn
            else:
                results[index] = drawn
        if missing:
            with self.lock:
                self._take_down(server, missing)

    def _take_down(self, server: EngineServer, error: EngineDiedError) -> None:
        """Note that a server is down. Raises RuntimeError for one that stays stale."""
        if server not in self.up:
            return
        self.up.discard(server)
        self.tried.pop(server, None)
        self.stale[server] += isinstance(error, StaleWeightsError)
        print(f"{error}: its unfinished turns are sampled again", flush=True)
        if self.stale[server] > STALE:
            raise RuntimeError(
                f"{error}, {self.stale[server]} times since it got these: does another run use it?"
            )

    def _await_a_server(self) -> None:
        """Try servers that are down; wait until one is up. Raises EngineDiedError as ``load``."""
        deadline = time.monotonic() + SERVER_WAIT
        while True:
            errors = self._bring_back()
            if self.up:
                return
            if errors and time.monotonic() > deadline:
                raise EngineDiedError("; ".join(errors))
            time.sleep(RETRY_PAUSE)

    def _bring_back(self) -> list[str]:
        """Give servers that are down the weights, at most once in RETRY_PAUSE; return errors."""
        now = time.monotonic()
        due = [
            server
            for server in self.servers
            if server not in self.up and now - self.tried.get(server, -RETRY_PAUSE) >= RETRY_PAUSE
        ]
        errors = []
        with ThreadPoolExecutor(max(1, len(due))) as pool:
            loads = {pool.submit(server.load, self.folder, self.version): server for server in due}
            for load, server in loads.items():
                try:
                    load.result()
                    self.up.add(server)
                except EngineDiedError as error:
                    errors.append(str(error))
                    if server not in self.tried:
                        print(f"{error}; it is tried again", flush=True)
                self.tried[server] = time.monotonic()
        return errors

"""Which rows of a cache hold the tokens of which paths. Pure.

Paths whose tokens are the same share a row, and part where the tokens do. A path that has stopped
keeps the beginning of a row that goes on with other paths, because a row is only ever extended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wanted:
    """Paths that go on together, in a row that begins with ``known`` tokens of ``source``."""

    handles: Sequence[int]
    source: int | None  # a row; None for paths of which nothing is cached
    known: int


@dataclass(frozen=True)
class Copies:
    """Copy the first ``positions`` of rows ``source`` to ``target``; read all before writing."""

    source: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    positions: int = 0


class Rows:
    """The rows of a cache, at least as many as there are paths."""

    def __init__(self, count: int) -> None:
        self.row: dict[int, int | None] = {}  # of each path; None: nothing is cached
        self.length: dict[int, int] = {}  # of each path: tokens of it that its row begins with
        self.users: list[set[int]] = [set() for _ in range(count)]  # row -> paths
        self.opened = 0

    def open(self) -> int:
        """Return a new path. Raises RuntimeError where there is no row for another one."""
        if len(self.row) == len(self.users):
            raise RuntimeError(f"all {len(self.users)} paths of this session are in use")
        self.opened += 1
        self.row[self.opened], self.length[self.opened] = None, 0
        return self.opened

    def fork(self, handle: int) -> int:
        """Return a new path with the same tokens, in the same row."""
        child = self.open()
        self._put(child, self.row[handle], self.length[handle])
        return child

    def close(self, handle: int) -> None:
        """Forget a path."""
        self._leave(handle)
        del self.row[handle], self.length[handle]

    def arrange(self, row_requests: Sequence[Wanted]) -> tuple[list[int], Copies]:
        """Give each of N ``row_requests`` a row of its own among the first N, to be extended.

        A path is in one of them at most; the others keep what they have, maybe in another row.
        Returns the row of each, and what to copy before anything is written.
        """
        for one in row_requests:
            for handle in one.handles:
                self._leave(handle)
        extended = self._extended(row_requests)
        rows = _places(extended, len(row_requests))
        moved = self._moved(extended, rows)
        copies = [
            (one.source, row, one.known)
            for one, row in zip(row_requests, rows, strict=True)
            if one.source not in (None, row)
        ]
        guests = {row: self.users[row] for row, target in moved.items() if target != row}
        for row in guests:
            self.users[row] = set()
        for row, handles in guests.items():
            if row not in extended.values():
                copies.append((row, moved[row], max(self.length[handle] for handle in handles)))
            for handle in handles:
                self._put(handle, moved[row], self.length[handle])
        for one, row in zip(row_requests, rows, strict=True):
            for handle in one.handles:
                self._put(handle, row, one.known)
        return rows, Copies(
            [source for source, _, _ in copies if source is not None],
            [target for _, target, _ in copies],
            max((length for _, _, length in copies), default=0),
        )

    def _extended(self, row_requests: Sequence[Wanted]) -> dict[int, int]:
        """Return which requests extend their source, and need no copy of it: index -> row.

        The first one of a source does, unless a path that is not wanted needs what follows there.
        """
        first: dict[int, int] = {}
        for index, one in enumerate(row_requests):
            if one.source is not None and all(
                self.length[handle] <= one.known for handle in self.users[one.source]
            ):
                first.setdefault(one.source, index)
        return {index: row for row, index in first.items()}

    def _moved(self, extended: dict[int, int], rows: Sequence[int]) -> dict[int, int]:
        """Return where the paths go that are not wanted and cannot stay: row -> row.

        Those of a row that is extended go with it. Others leave the first rows for the last ones,
        out of the way when more rows are wanted.
        """
        moved = {row: rows[index] for index, row in extended.items()}
        behind = range(len(rows), len(self.users))
        free = [row for row in behind if row in moved or not self.users[row]]
        for row in range(len(rows)):
            if row not in moved and self.users[row]:
                moved[row] = free.pop()
        return moved

    def _leave(self, handle: int) -> None:
        row = self.row[handle]
        if row is not None:
            self.users[row].discard(handle)
            self.row[handle] = None

    def _put(self, handle: int, row: int | None, length: int) -> None:
        self.row[handle], self.length[handle] = row, length
        if row is not None:
            self.users[row].add(handle)


def _places(extended: dict[int, int], count: int) -> list[int]:
    """Return the rows of ``count`` wanted ones: the row that each extends, where it is in front."""
    rows_in_front = {index: row for index, row in extended.items() if row < count}
    others = iter(sorted(set(range(count)) - set(rows_in_front.values())))
    return [
        rows_in_front[index] if index in rows_in_front else next(others) for index in range(count)
    ]

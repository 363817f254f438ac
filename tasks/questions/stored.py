"""Sequences of which a portion at a time is in memory; the rest lies in a temporary file.

A file of a million questions must not fill the memory. So what is read from it goes into a
``Stored``, and a part of it, a field of each value, or several sequences one after another are
views. The functions take other sequences, such as lists, as well.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, compress, islice, pairwise
from typing import IO, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tasks.ledger.artifacts import ROOT

T = TypeVar("T")
R = TypeVar("R")
PORTION = 1024  # values that are in memory at once


class Lazy(Sequence[T]):
    """Base class: values that are read when they are needed, best of all in their order."""

    def at(self, places: NDArray[np.integer[Any]]) -> Iterator[T]:
        """Yield the values at these places, from 0 on."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        places = np.arange(len(self))[index]
        return Selected(self, places) if isinstance(index, slice) else next(self.at(places[None]))

    def __iter__(self) -> Iterator[T]:
        return self.at(np.arange(len(self)))

    def __eq__(self, other: object) -> bool:
        """Return whether another sequence, of any kind, has equal values."""
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


class Stored(Lazy[T]):
    """Values in a temporary file, which has no name and ends with the process."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._ends = [0]  # of the portions in the file
        self._last: list[T] = []  # the portion that is not full yet
        self._read: tuple[int, list[T]] = (-1, [])  # the portion that was read last

    def append(self, value: T) -> None:
        """Append a value, which can be pickled."""
        self._last.append(value)
        if len(self._last) == PORTION:
            self._write()

    def extend(self, values: Iterable[T]) -> None:
        """Append several values."""
        for value in values:
            self.append(value)

    def _write(self) -> None:
        if self._file is None:
            # beside the ledger: a system's folder of temporary files may lie in memory
            folder = ROOT.parent if ROOT.parent.is_dir() else None
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        written = pickle.dumps(self._last, pickle.HIGHEST_PROTOCOL)
        self._file.write(written)
        self._file.flush()
        self._ends.append(self._ends[-1] + len(written))
        self._last = []

    def __len__(self) -> int:
        return (len(self._ends) - 1) * PORTION + len(self._last)

    def at(self, places: NDArray[np.integer[Any]]) -> Iterator[T]:
        """Yield the values at these places."""
        portions = places // PORTION
        borders = np.flatnonzero(np.diff(portions)) + 1
        for start, end in pairwise([0, *borders.tolist(), len(places)]):
            if start < end:
                portion = self._portion(int(portions[start]))
                yield from [portion[index] for index in (places[start:end] % PORTION).tolist()]

    def _portion(self, number: int) -> list[T]:
        if number == len(self._ends) - 1:
            return self._last
        if self._read[0] != number:
            assert self._file
            start, end = self._ends[number : number + 2]
            written = os.pread(self._file.fileno(), end - start, start)
            self._read = (number, pickle.loads(written))
        return self._read[1]


class Selected(Lazy[T]):
    """The values of another sequence at some places."""

    def __init__(self, whole: Lazy[T], places: NDArray[np.integer[Any]]) -> None:
        self._whole, self._places = whole, places.astype(np.int32)

    def __len__(self) -> int:
        return len(self._places)

    def at(self, places: NDArray[np.integer[Any]]) -> Iterator[T]:
        """Yield the values at these places."""
        return self._whole.at(self._places[places])


class Mapped(Lazy[T], Generic[T]):
    """What a function returns for each value of another sequence."""

    def __init__(self, read: Callable[[Any], T], whole: Lazy[Any]) -> None:
        self._read, self._whole = read, whole

    def __len__(self) -> int:
        return len(self._whole)

    def at(self, places: NDArray[np.integer[Any]]) -> Iterator[T]:
        """Yield the values at these places."""
        return map(self._read, self._whole.at(places))


class Chained(Lazy[T]):
    """Several sequences, one after another."""

    def __init__(self, parts: Sequence[Sequence[T]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def at(self, places: NDArray[np.integer[Any]]) -> Iterator[T]:
        """Yield the values at these places."""
        parts = np.searchsorted(self._ends, places, side="right")
        borders = np.flatnonzero(np.diff(parts)) + 1
        for start, end in pairwise([0, *borders.tolist(), len(places)]):
            if start < end:
                number = int(parts[start])
                first = self._ends[number] - len(self._parts[number])
                yield from taken(self._parts[number], places[start:end] - first)


# ---------------------------------------------------------------- of any sequence


def taken(values: Sequence[T], places: NDArray[np.integer[Any]]) -> Iterator[T]:
    """Yield the values at these places."""
    return values.at(places) if isinstance(values, Lazy) else (values[i] for i in places.tolist())


def where(values: Sequence[T], flags: NDArray[np.bool_]) -> Sequence[T]:
    """Return the values whose flag is true: a view of a lazy sequence, else a list."""
    if isinstance(values, Lazy):
        return Selected(values, np.flatnonzero(flags))
    return list(compress(values, flags.tolist()))


def mapped(read: Callable[[Any], R], values: Sequence[Any]) -> Sequence[R]:
    """Return what ``read`` returns for each value: a view of a lazy sequence, else a list."""
    return Mapped(read, values) if isinstance(values, Lazy) else list(map(read, values))


def chained(*parts: Sequence[T]) -> Sequence[T]:
    """Return the sequences one after another: a view if one of them is lazy, else a list."""
    if any(isinstance(part, Lazy) for part in parts):
        return Chained(parts)
    return list(chain(*parts))


def portions(values: Iterable[T], size: int = PORTION) -> Iterator[list[T]]:
    """Yield the values in lists of ``size``, of which the last may be shorter."""
    remaining = iter(values)
    while portion := list(islice(remaining, size)):
        yield portion

"""Read records, and the fields in them, from files of several formats.

The suffix names the format: JSON lines (.jsonl, .ndjson), JSON (.json), Parquet (.parquet), CSV
with a header (.csv). Text is UTF-8, with or without a byte order mark. A field is a dotted path
into a record, such as ``prompt.0.content``.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Record = dict[str, Any]
Place = str  # of a record, for messages: "data/sources/mine/train.jsonl, line 3"

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PARQUET_ROWS = 1024  # read at a time
SHOWN = 60  # characters of a value in a message


def records(file: Path, under: str | None = None) -> Iterator[tuple[Place, Record]]:
    """Yield the records of a file in their order, each with its place; blank lines are skipped.

    ``under``: in a JSON file that is no list, the field that holds the list.
    Raises ValueError with file, place, value and remedy when it reaches a fault: a file that is
    missing, empty, of an unknown suffix, not in its format or not UTF-8, a record that is no
    object, a CSV row whose length differs from the header's.
    """
    if file.suffix not in FORMATS:
        raise ValueError(
            f"{file} has the suffix '{file.suffix}': known are {', '.join(FORMATS)}; convert it"
        )
    if not file.is_file():
        raise ValueError(f"{file} does not exist: put the file there, or correct the path to it")
    place = None
    for place, record in FORMATS[file.suffix](file, under):
        if not isinstance(record, dict):
            raise ValueError(
                f"{place} is no object but {_shown(record)}: a record is fields with their values"
            )
        yield place, record
    if place is None:
        raise ValueError(f"{file} is empty: it needs at least one record")


def value(record: Record, path: str, place: Place) -> Any:
    """Return a record's value at a dotted path; a number is a place in a list, -1 the last.

    A key that equals the whole (rest of the) path is preferred to the path through its parts.
    Raises ValueError with the existing fields where the path does not exist.
    """
    found: Any = record
    rest = path
    while rest:
        if isinstance(found, dict) and rest in found:
            return found[rest]
        part, _, rest = rest.partition(".")
        try:
            found = found[int(part)] if isinstance(found, list) else found[part]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(
                f"{place} lacks the field '{path}': {_offer(found)}; name the right field"
            ) from None
    return found


def text(record: Record, path: str, place: Place) -> str:
    """Return the text at a dotted path, without surrounding space; a number as ``as_text`` does.

    Raises ValueError where ``value`` does, and for a value that is empty, or no text or number.
    """
    return as_text(value(record, path, place), f"{place}: the field '{path}'")


def as_text(found: Any, name: str) -> str:
    """Return a text without surrounding space, or a number in digits: 18.0 as 18, 1e-3 as 0.001.

    Raises ValueError, which calls the value ``name``, where it is empty or something else.
    """
    if isinstance(found, int | float | Decimal) and not isinstance(found, bool):
        return _digits(Decimal(str(found)), name)
    if not isinstance(found, str | None):
        raise ValueError(f"{name} is no text or number but {_shown(found)}: name another field")
    written = (found or "").strip()
    if not written:
        raise ValueError(f"{name} is empty: fill it in, or drop the record")
    return written


def _digits(number: Decimal, name: str) -> str:
    if not number.is_finite():
        raise ValueError(f"{name} is {number}, which is no number: correct it, or drop the record")
    written = format(number, "f")
    if "." in written:
        written = written.rstrip("0").rstrip(".")
    return "0" if written == "-0" else written


def _offer(found: Any) -> str:
    """Describe the value that lacks the field."""
    if isinstance(found, dict):
        return f"it has {sorted(found)}"
    if isinstance(found, list):
        return f"it has a list of {len(found)} there"
    return f"it has {_shown(found)} there, which has no fields"


def _shown(found: Any) -> str:
    written = repr(found)
    return written if len(written) <= SHOWN else f"{written[:SHOWN]}..."


# ---------------------------------------------------------------- formats


def _json_lines(file: Path, under: str | None) -> Iterator[tuple[Place, Any]]:
    for number, line in _lines(file):
        if line.strip():
            place = f"{file}, line {number}"
            yield place, _parsed(line, place, "an object a line")


def _json(file: Path, under: str | None) -> Iterator[tuple[Place, Any]]:
    written = "".join(line for _, line in _lines(file))
    if not written.strip():
        return
    found = _parsed(written, str(file), "a list of objects")
    if isinstance(found, dict) and under:
        found = value(found, under, str(file))
    if not isinstance(found, list):
        raise ValueError(
            f"{file} holds no list of objects{f' under {under!r}' if under else ''} but "
            f"{_shown(found)}: name the field that holds it (records, in params/benchmarks.yaml)"
        )
    for number, record in enumerate(found, start=1):
        yield f"{file}, record {number}", record


def _parsed(written: str, place: Place, expected: str) -> Any:
    try:
        return json.loads(written)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise ValueError(f"{place} is not JSON ({error}): {expected} is expected") from None


def _parquet(file: Path, under: str | None) -> Iterator[tuple[Place, Any]]:
    number = 0
    try:
        with pq.ParquetFile(file) as table:
            _check_distinct(file, table.schema_arrow.names)
            for batch in table.iter_batches(PARQUET_ROWS):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", record
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        line = str(error).partition("\n")[0]
        raise ValueError(
            f"{file} cannot be read as Parquet after row {number} ({line}): fetch or write it anew"
        ) from None


def _csv(file: Path, under: str | None) -> Iterator[tuple[Place, Any]]:
    rows = csv.reader((line for _, line in _lines(file)), strict=True)
    header: list[str] = []
    try:
        for row in rows:
            if not row:
                continue
            if not header:
                _check_distinct(file, row)
                header = row
                continue
            place = f"{file}, line {rows.line_num}"
            if len(row) != len(header):
                raise ValueError(
                    f"{place} has {len(row)} fields and the header {len(header)} ({header}): put "
                    'a field that has a comma or a line end in it between quotes (")'
                )
            yield place, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise ValueError(
            f"{file}, line {rows.line_num} is not CSV ({error}): correct it, or use JSON lines"
        ) from None


def _check_distinct(file: Path, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{file} has more than one column {twice[0]!r}: rename all but one")


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line numbers, from 1, and lines with their line feed, which alone ends a line."""
    with file.open("rb") as binary:
        for number, line in enumerate(binary, start=1):
            try:
                yield number, line.removeprefix(BYTE_ORDER_MARK if number == 1 else b"").decode()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{file}, line {number} is not UTF-8 ({error.reason}): save it as UTF-8"
                ) from None


FORMATS: dict[str, Callable[[Path, str | None], Iterator[tuple[Place, Any]]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": _csv,
}

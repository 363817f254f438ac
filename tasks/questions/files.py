"""Read records from files of several formats.

The suffix, in capitals or not, names the format: JSON lines (.jsonl, .ndjson), JSON (.json),
Parquet (.parquet), CSV or TSV with a header (.csv, .tsv). A text file may be compressed (.gz).
Text is UTF-8, with or without a byte order mark.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.questions.faults import Fault, Place, RecordError, shown
from tasks.questions.fields import Record, Unreadable, value

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
COMPRESSED = ".gz"
DELIMITERS = (",", ";", "\t")
PARQUET_ROWS = 1024  # read at a time

# Of values that Arrow has and Python has not, such as dates after the year 9999.
CONVERSION_ERRORS = (ValueError, ArithmeticError, LookupError)
csv.field_size_limit(2**31 - 1)  # a cell may be a whole document

_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # bytes that "surrogateescape" could not decode
Rows = Iterator[tuple[Place, Any]]


def records(file: Path, under: str | None = None) -> Iterator[tuple[Place, Record]]:
    """Yield the records of a file as ``rows`` does; raise RecordError at the first faulty one."""
    for place, record in rows(file, under):
        if isinstance(record, Fault):
            raise RecordError(record)
        yield place, record


def rows(file: Path, under: str | None = None) -> Iterator[tuple[Place, Record | Fault]]:
    """Yield the records of a file in their order, each with its place; blank lines are skipped.

    A record that cannot be read comes as its Fault: a line that is not JSON or not UTF-8, a record
    that is no object, a CSV row whose length differs from the header's.
    ``under``: in a JSON file that is no list, the field that holds the list.
    Raises ValueError with file, value and remedy for a file that is missing, empty, of an unknown
    suffix, a pointer of Git LFS, or not in its format.
    """
    kind = format_of(file)
    if kind not in FORMATS:
        raise ValueError(
            f"{file} has the suffix '{file.suffix}': known are {', '.join(FORMATS)}, each but "
            f".parquet also with {COMPRESSED}; convert it"
        )
    _check_content(file)
    place = None
    for place, record in FORMATS[kind](file, under):
        if isinstance(record, dict | Fault):
            yield place, record
        else:
            remedy = "a record is fields with their values"
            yield place, Fault(place, "is no object", remedy, detail=f" but {shown(record)}")
    if place is None:
        raise ValueError(f"{file} is empty: it needs at least one record")


def format_of(file: Path) -> str:
    """Return the suffix that names a file's format, in small letters and without .gz."""
    suffixes = [suffix.lower() for suffix in file.suffixes[-2:]]
    if len(suffixes) > 1 and suffixes[-1] == COMPRESSED and suffixes[0] != ".parquet":
        return suffixes[0]
    return suffixes[-1] if suffixes else ""


def _check_content(file: Path) -> None:
    if not file.is_file():
        raise ValueError(f"{file} does not exist: put the file there, or correct the path to it")
    with file.open("rb") as binary:
        first = binary.read(len(LFS_POINTER))
    if first == LFS_POINTER:
        raise ValueError(
            f"{file} is a pointer of Git LFS and not the data: fetch the data with `git lfs pull` "
            "where the file comes from"
        )
    if first.startswith(UTF16_MARKS):
        raise ValueError(f"{file} is UTF-16: save it as UTF-8")


# ---------------------------------------------------------------- formats


def _json_lines(file: Path, under: str | None) -> Rows:
    for number, line in _lines(file):
        place = f"{file}, line {number}"
        try:
            written = line.decode()
        except UnicodeDecodeError as error:
            yield place, _not_utf8(place, error.reason)
            continue
        if written.strip():
            yield place, _parsed(written, place)


def _json(file: Path, under: str | None) -> Rows:
    written = "".join(_text_lines(file))
    if not written.strip():
        return
    found = _parsed(written, str(file))
    if isinstance(found, Fault):
        remedy = "a list of objects is expected; a file of an object a line is a .jsonl"
        raise RecordError(replace(found, remedy=remedy))
    if isinstance(found, dict) and under:
        found = value(found, under, str(file))
    if not isinstance(found, list):
        raise ValueError(
            f"{file} holds no list of objects{f' under {under!r}' if under else ''} but "
            f"{shown(found)}: name the field that holds it (records, in params/benchmarks.yaml)"
        )
    for number, record in enumerate(found, start=1):
        yield f"{file}, record {number}", record


def _parsed(written: str, place: Place) -> Any:
    """Return the value of a JSON text, or a Fault."""
    try:
        return json.loads(written)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        return Fault(place, "is not JSON", "an object is expected", detail=f" ({error})")


def _parquet(file: Path, under: str | None) -> Rows:
    number = 0
    try:
        with pq.ParquetFile(file) as table:
            _check_distinct(file, table.schema_arrow.names)
            for batch in table.iter_batches(PARQUET_ROWS):
                for record in _batch_rows(batch):
                    number += 1
                    yield f"{file}, row {number}", record
    except (pa.ArrowException, OSError) as error:
        line = str(error).partition("\n")[0]
        raise ValueError(
            f"{file} cannot be read as Parquet after row {number} ({line}): fetch or write it anew"
        ) from None


def _batch_rows(batch: pa.RecordBatch) -> list[Record]:
    """Return the rows of a batch; a value that cannot be read as Unreadable."""
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_float16(column.type) or pa.types.is_float32(column.type):
            column = column.cast(pa.string())  # as a Python float, 0.1 has 17 digits
        try:
            columns[name] = column.to_pylist()
        except CONVERSION_ERRORS:
            columns[name] = [_converted(value) for value in column]
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def _converted(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return Unreadable("is not UTF-8", "save it as UTF-8", f" ({error.reason})")
    except CONVERSION_ERRORS as error:
        return Unreadable("cannot be read", "correct it, or drop the record", f" ({error})")


def _csv(file: Path, under: str | None) -> Rows:
    numbered = _lines(file)
    blank = (None, b"")  # of a file without a line
    number, first = next((each for each in numbered if each[1].strip(b"\r\n")), blank)
    lines = chain([first], (line for _, line in numbered))
    texts = (line.decode(errors="surrogateescape") for line in lines)
    delimiter = "\t" if format_of(file) == ".tsv" else _delimiter(first)
    table = csv.reader(texts, strict=True, delimiter=delimiter)
    header: list[str] = []
    line = number or 1  # of the first of a row
    while True:
        place = f"{file}, line {line}"
        try:
            row = next(table, None)
        except csv.Error as error:
            remedy = "correct it, or use JSON lines"
            yield place, Fault(place, "is not CSV", remedy, detail=f" ({error})")
            row = []
        line = table.line_num + (number or 1)
        if row is None:
            return
        if row and not header:
            _check_header(file, row)
            header = row
        elif row:
            yield place, _csv_record(row, header, place)


def _delimiter(header: bytes) -> str:
    """Return what separates the columns: the delimiter that gives the most; commas go first."""
    text = header.decode(errors="surrogateescape").rstrip("\r\n")
    try:
        counts = [len(next(csv.reader([text], delimiter=each), [])) for each in DELIMITERS]
    except csv.Error:  # which the whole file's reader raises again, with the line
        return DELIMITERS[0]
    return DELIMITERS[counts.index(max(counts))]


def _csv_record(row: list[str], header: list[str], place: Place) -> Record | Fault:
    for name, cell in zip(header, row, strict=False):
        if found := _NOT_UTF8.search(cell):
            return _not_utf8(place, f"byte 0x{ord(found[0]) - 0xDC00:02x}", name)
    if len(row) == len(header):
        return {name: cell for name, cell in zip(header, row, strict=True) if name}
    return Fault(
        place,
        "has another number of fields than the header",
        'put a field that has a separator or a line end in it between quotes (")',
        detail=f" ({len(row)}, and the header {len(header)}: {header})",
    )


def _check_header(file: Path, names: list[str]) -> None:
    if any(_NOT_UTF8.search(name) for name in names):
        raise ValueError(f"{file}: the header is not UTF-8: save the file as UTF-8")
    _check_distinct(file, [name for name in names if name])


def _check_distinct(file: Path, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{file} has more than one column {twice[0]!r}: rename all but one")


def _not_utf8(place: Place, reason: str, field: str = "") -> Fault:
    return Fault(place, "is not UTF-8", "save it as UTF-8", field, f" ({reason})")


def _text_lines(file: Path) -> Iterator[str]:
    for number, line in _lines(file):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise RecordError(_not_utf8(f"{file}, line {number}", error.reason)) from None


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield line numbers, from 1, and lines with their line feed, which alone ends a line."""
    compressed = file.suffix.lower() == COMPRESSED
    with gzip.open(file) if compressed else file.open("rb") as binary:
        try:
            for number, line in enumerate(binary, start=1):
                yield number, line.removeprefix(BYTE_ORDER_MARK if number == 1 else b"")
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{file} is not a whole gzip file ({error}): fetch it again") from None


FORMATS: dict[str, Callable[[Path, str | None], Rows]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": _csv,
    ".tsv": _csv,
}
SUFFIXES = (  # of files that can be read, in small letters
    *FORMATS,
    *(f"{suffix}{COMPRESSED}" for suffix in FORMATS if suffix != ".parquet"),
)

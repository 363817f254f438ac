"""Read records from files of several formats.

The suffix, in capitals or not, names the format: JSON lines (.jsonl, .ndjson), JSON (.json),
Parquet (.parquet), CSV or TSV with a header (.csv, .tsv). A text file may be compressed (.gz).
Text is UTF-8, with or without a byte order mark.

A small file may unpack to more than the memory holds. So files are read in parts, Parquet only in
the columns that are needed, and one that unpacks to more than ``LARGEST`` bytes or to more than
``MOST_RECORDS`` records is refused.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.questions import parquet
from tasks.questions.faults import Fault, Place, RecordError, shown
from tasks.questions.fields import Record, Unreadable, WrittenNumber, value

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
COMPRESSED = ".gz"
DVC_OBJECT = re.compile(r"/files/md5/[0-9a-f]{2}/[0-9a-f]{30}$")  # of its cache
DELIMITERS = (",", ";", "\t")
LARGEST = 2**30  # bytes of a file, unpacked
LARGEST_LINE = 2**24  # bytes of a line or of a value, which may be a whole document
MOST_RECORDS = 2_000_000  # of a file
MOST_BRACKETS = 20_000_000  # of a JSON file, which is parsed as a whole: objects and lists

csv.field_size_limit(LARGEST_LINE)

_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # bytes that "surrogateescape" could not decode
Rows = Iterator[tuple[Place, Any]]


def records(
    file: Path, under: str | None = None, fields: Collection[str] | None = None
) -> Iterator[tuple[Place, Record]]:
    """Yield the records of a file as ``rows`` does; raise RecordError at the first faulty one."""
    for location, record in rows(file, under, fields):
        if isinstance(record, Fault):
            raise RecordError(record)
        yield location, record


def rows(
    file: Path, under: str | None = None, fields: Collection[str] | None = None
) -> Iterator[tuple[Place, Record | Fault]]:
    """Yield the records of a file in their order, each with its place; blank lines are skipped.

    A record that cannot be read comes as its Fault: a line that is not JSON, not UTF-8 or longer
    than ``LARGEST_LINE``, a record that is no object or has a key twice, a CSV row whose length
    differs from the header's.
    ``under``: in a JSON file that is no list, the field that holds the list. ``fields``: dotted
    paths that are read, others may be None; by default all.
    Raises ValueError with file, value and remedy for a file that is missing, no regular file,
    empty, of an unknown suffix, too large, a pointer of Git LFS, or not in its format.
    """
    kind = format_of(file)
    if kind not in FORMATS:
        raise ValueError(
            f"{file} has the suffix '{file.suffix}': known are {', '.join(FORMATS)}, each but "
            f".parquet also with {COMPRESSED}; convert it"
        )
    before = _check_content(file)
    location = None
    for number, (location, record) in enumerate(FORMATS[kind](file, under, fields), start=1):
        if number > MOST_RECORDS:
            raise ValueError(_too_large(file, f"more than {MOST_RECORDS:,} records"))
        if isinstance(record, dict | Fault):
            yield location, record
        elif isinstance(record, Unreadable):
            yield location, Fault(location, record.problem, record.remedy, "", record.detail)
        else:
            remedy = "a record is fields with their values"
            yield location, Fault(location, "is no object", remedy, detail=f" but {shown(record)}")
    if location is None:
        raise ValueError(f"{file} is empty: it needs at least one record")
    if _state(file.stat()) != before:
        raise ValueError(f"{file} has changed while it was read: run again once it is complete")


def format_of(file: Path) -> str:
    """Return the suffix that names a file's format, in small letters and without .gz."""
    suffixes = [suffix.lower() for suffix in file.suffixes[-2:]]
    if len(suffixes) > 1 and suffixes[-1] == COMPRESSED and suffixes[0] != ".parquet":
        return suffixes[0]
    return suffixes[-1] if suffixes else ""


def opened(file: Path) -> BinaryIO:
    """Open a regular file. Raises ValueError for any other, without waiting for its other end."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(
            f"{file} cannot be read ({error.strerror}): give yourself the right to read it, or put "
            "the file there anew"
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(_irregular(file))
    return os.fdopen(descriptor, "rb")


def _state(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _check_content(file: Path) -> tuple[int, int, int]:
    """Check what can be seen before a file is read, and return its state."""
    if not file.exists():
        raise ValueError(f"{file} does not exist: put the file there, or correct the path to it")
    check_regular(file)
    with opened(file) as binary:
        status = os.fstat(binary.fileno())
        if status.st_size > LARGEST:
            raise ValueError(_too_large(file, f"{status.st_size:,} bytes"))
        first = _first(file, binary, status.st_size)
    if first == LFS_POINTER:
        raise ValueError(
            f"{file} is a pointer of Git LFS and not the data: fetch the data with `git lfs pull` "
            "where the file comes from"
        )
    if first.startswith(UTF16_MARKS):
        raise ValueError(f"{file} is UTF-16: save it as UTF-8")
    return _state(status)


def _first(file: Path, binary: BinaryIO, size: int) -> bytes:
    """Return the first bytes of a file; ValueError for one that the kernel makes while it is read.

    Such files have no size, and reading some of them, such as /proc/kmsg, never ends.
    """
    try:
        first = os.read(binary.fileno(), len(LFS_POINTER))
    except OSError:  # nothing yet: it waits for more
        first = b"?"
    if first and not size:
        raise ValueError(_irregular(file))
    return first


def _irregular(file: Path) -> str:
    return f"{file} is no regular file: put a file there, or remove it"


# ---------------------------------------------------------------- what may be in a folder


def check_regular(file: Path) -> None:
    """Raise ValueError for a pipe, a device or a socket, which may never end; also for a folder."""
    if not file.is_file():
        raise ValueError(_irregular(file))
    if not file.stat().st_size:
        with opened(file) as binary:
            _first(file, binary, 0)


def check_folder(folder: Path, *, links: bool = True) -> None:
    """Raise ValueError with all paths in a folder that nobody can read to an end, or watch.

    These are pipes, devices, sockets and files of the kernel, links that lead nowhere or around in
    a circle, and, with ``links``, links that lead out of the folder: what is there may change
    without notice. Links into DVC's cache are DVC's own.
    """
    faults = [_fault(path, folder, links) for path in sorted(folder.rglob("*"))]
    if any(faults):
        raise ValueError("\n".join(filter(None, faults)))


def _fault(path: Path, folder: Path, links: bool) -> str:
    if path.is_symlink() and not path.exists():
        return f"{path} is a link that leads nowhere: remove it"
    if not path.is_dir():
        try:
            check_regular(path)
        except ValueError as error:
            return str(error)
    if path.is_symlink():
        target = Path(os.path.realpath(path))
        if path.parent.resolve().is_relative_to(target):
            return f"{path} is a link to a folder that it lies in: remove it"
        inside = target.is_relative_to(folder.resolve())
        if links and not inside and not DVC_OBJECT.search(str(target)):
            return (
                f"{path} is a link that leads out of {folder}/, to {target}: copy what is there, "
                "mount its folder here (mount --bind), or have DVC fetch it (dvc import-url)"
            )
    return ""


def _too_large(file: Path, extent: object) -> str:
    return (
        f"{file} is too large to read ({extent}): a file may unpack to {LARGEST:,} bytes and "
        f"{MOST_RECORDS:,} records, and a value to {LARGEST_LINE:,} bytes; split it into several "
        "files, or keep only what is read"
    )


# ---------------------------------------------------------------- formats


def _json_lines(file: Path, under: str | None, fields: Collection[str] | None) -> Rows:
    for number, line in _lines(file, LARGEST_LINE):
        location = f"{file}, line {number}"
        if len(line) > LARGEST_LINE:
            detail = f" (more than {LARGEST_LINE:,} bytes)"
            yield location, Fault(location, "is too long", "shorten it, or drop it", "", detail)
            continue
        try:
            written = line.decode()
        except UnicodeDecodeError as error:
            yield location, _not_utf8(location, error.reason)
            continue
        if written.strip():
            yield location, _parsed(written, location)


def _json(file: Path, under: str | None, fields: Collection[str] | None) -> Rows:
    written = "".join(_text_lines(file))
    if not written.strip():
        return
    if (brackets := written.count("{") + written.count("[")) > MOST_BRACKETS:
        raise ValueError(_too_large(file, f"{brackets:,} objects and lists in one JSON value"))
    document = _parsed(written, str(file))
    if isinstance(document, Fault):
        remedy = "a list of objects is expected; a file of an object a line is a .jsonl"
        raise RecordError(replace(document, remedy=remedy))
    if isinstance(document, dict) and under:
        document = value(document, under, str(file))
    if not isinstance(document, list):
        raise ValueError(
            f"{file} holds no list of objects{f' under {under!r}' if under else ''} but "
            f"{shown(document)}: name the field that holds it (records, in params/benchmarks.yaml)"
        )
    for number, record in enumerate(document, start=1):
        yield f"{file}, record {number}", record


def _parsed(written: str, location: Place) -> Any:
    """Return the value of a JSON text, or a Fault."""
    try:
        return json.loads(written, object_pairs_hook=_object, parse_float=WrittenNumber.of)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        return Fault(location, "is not JSON", "an object is expected", detail=f" ({error})")


def _object(pairs: list[tuple[str, Any]]) -> Record | Unreadable:
    """Return an object; what stands for it where a key is there twice, of which one would win."""
    record = dict(pairs)
    if len(record) == len(pairs):
        return record
    names = [name for name, _ in pairs]
    twice = next(name for name in names if names.count(name) > 1)
    return Unreadable("has a key twice", "keep one of them", f" ({shown(twice)})")


def _parquet(file: Path, under: str | None, fields: Collection[str] | None) -> Rows:
    number = 0
    try:
        with opened(file) as binary, pq.ParquetFile(binary) as table:
            _check_distinct(file, table.schema_arrow.names)
        for record in parquet.records(file, fields, LARGEST, LARGEST_LINE):
            number += 1
            yield f"{file}, row {number}", record
    except parquet.TooLargeError as error:
        raise ValueError(_too_large(file, error)) from None
    except (pa.ArrowException, OSError) as error:
        line = str(error).partition("\n")[0]
        raise ValueError(
            f"{file} cannot be read as Parquet after row {number} ({line}): fetch or write it anew"
        ) from None


def _csv(file: Path, under: str | None, fields: Collection[str] | None) -> Rows:
    numbered = _lines(file, LARGEST_LINE)
    blank = (None, b"")  # of a file without a line
    number, first = next((each for each in numbered if each[1].strip(b"\r\n")), blank)
    lines = chain([first], (line for _, line in numbered))
    texts = (line.decode(errors="surrogateescape") for line in lines)
    delimiter = "\t" if format_of(file) == ".tsv" else _delimiter(first)
    table = csv.reader(texts, strict=True, delimiter=delimiter)
    header: list[str] = []
    line = number or 1  # of the first of a row
    while True:
        location = f"{file}, line {line}"
        try:
            row = next(table, None)
        except csv.Error as error:
            remedy = "correct it, or use JSON lines"
            yield location, Fault(location, "is not CSV", remedy, detail=f" ({error})")
            row = []
        line = table.line_num + (number or 1)
        if row is None:
            return
        if row and not header:
            _check_header(file, row)
            header = row
        elif row:
            yield location, _csv_record(row, header, location)


def _delimiter(header: bytes) -> str:
    """Return what separates the columns: the delimiter that gives the most; commas go first."""
    text = header.decode(errors="surrogateescape").rstrip("\r\n")
    try:
        counts = [len(next(csv.reader([text], delimiter=each), [])) for each in DELIMITERS]
    except csv.Error:  # which the whole file's reader raises again, with the line
        return DELIMITERS[0]
    return DELIMITERS[counts.index(max(counts))]


def _csv_record(row: list[str], header: list[str], location: Place) -> Record | Fault:
    for name, cell in zip(header, row, strict=False):
        if matched := _NOT_UTF8.search(cell):
            return _not_utf8(location, f"byte 0x{ord(matched[0]) - 0xDC00:02x}", name)
    if len(row) == len(header):
        return {name: cell for name, cell in zip(header, row, strict=True) if name}
    return Fault(
        location,
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


def _not_utf8(location: Place, reason: str, field: str = "") -> Fault:
    return Fault(location, "is not UTF-8", "save it as UTF-8", field, f" ({reason})")


def _text_lines(file: Path) -> Iterator[str]:
    for number, line in _lines(file, LARGEST):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise RecordError(_not_utf8(f"{file}, line {number}", error.reason)) from None


def _lines(file: Path, longest: int) -> Iterator[tuple[int, bytes]]:
    """Yield line numbers, from 1, and lines with their line feed, which alone ends a line.

    Of a line of more than ``longest`` bytes, the first ``longest + 1``. Raises ValueError for a
    file that is larger than ``LARGEST`` or damaged.
    """
    compressed = file.suffix.lower() == COMPRESSED
    number = size = 0
    whole = True  # the part before ended a line
    with opened(file) as stored, gzip.open(stored) if compressed else stored as binary:
        try:
            while part := binary.readline(longest + 1):
                size += len(part)
                if size > LARGEST:
                    raise ValueError(_too_large(file, f"{size:,} bytes up to line {number:,}"))
                if whole:
                    number += 1
                    yield number, part.removeprefix(BYTE_ORDER_MARK if number == 1 else b"")
                whole = part.endswith(b"\n")
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{file} is not a whole gzip file ({error}): fetch it again") from None


FORMATS: dict[str, Callable[[Path, str | None, Collection[str] | None], Rows]] = {
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

"""Read the rows of a Parquet file without unpacking more of it than fits into the memory.

A value that is repeated a million times is in the file once. So texts are read as dictionaries,
which hold each value once, and their size is known before they become Python's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.questions.fields import Record, Unreadable, WrittenNumber

ROWS = 1024  # read at a time
CONVERTED = 2**26  # bytes that become Python's values at a time
TEXTS = ("STRING", "JSON", "NONE")  # logical types of columns that are read as dictionaries

# Of values that Arrow has and Python has not, such as dates after the year 9999.
CONVERSION_ERRORS = (ValueError, ArithmeticError, LookupError)


class TooLargeError(Exception):
    """A file unpacks to more bytes than allowed; the message says how many and where."""


def records(
    file: Path, fields: Collection[str] | None, largest: int, largest_value: int
) -> Iterator[Record]:
    """Yield the rows of a file; a value that cannot be read as Unreadable.

    ``fields``: dotted paths that are needed; columns with none of them are None in every row.
    Raises TooLargeError for a file of more than ``largest`` bytes in the needed columns or with a
    value of more than ``largest_value``, pyarrow's errors for one that is damaged.
    """
    with pq.ParquetFile(file) as opened:
        texts = _texts(opened)
    with pq.ParquetFile(file, read_dictionary=texts) as opened:
        names = opened.schema_arrow.names
        needed = [name for name in names if fields is None or _holds(name, fields)]
        _check_stated(opened, needed, largest)
        size = number = 0
        for batch in _batches(opened, needed):
            sizes = [_unpacked(column) for column in batch.columns]
            size += sum(total for total, _ in sizes)
            longest = max((most for _, most in sizes), default=0)
            where = f"rows {number + 1:,} to {number + batch.num_rows:,}"
            if longest > largest_value:
                raise TooLargeError(f"a value of {longest:,} bytes in {where}")
            if size > largest:
                raise TooLargeError(f"{size:,} bytes up to {where}")
            number += batch.num_rows
            blank = dict.fromkeys(names)
            for part in _parts(batch, sum(total for total, _ in sizes)):
                yield from ({**blank, **row} for row in _rows(part))


def _batches(opened: pq.ParquetFile, needed: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield ``ROWS`` rows at a time, and never of two row groups.

    pyarrow cannot read nested texts as dictionaries across the border between two row groups.
    """
    for group in range(opened.num_row_groups):
        yield from opened.iter_batches(ROWS, [group], columns=needed, use_threads=False)


def _holds(name: str, fields: Collection[str]) -> bool:
    """Return whether one of the fields is in the column of this name."""
    return any(field == name or field.startswith(f"{name}.") for field in fields)


def _texts(opened: pq.ParquetFile) -> list[str]:
    """Return the paths of the columns of texts and bytes, those inside others included."""
    columns = [opened.schema.column(index) for index in range(len(opened.schema))]
    return [
        column.path
        for column in columns
        if column.physical_type == "BYTE_ARRAY" and column.logical_type.type in TEXTS
    ]


def _check_stated(opened: pq.ParquetFile, needed: Collection[str], largest: int) -> None:
    """Raise TooLargeError where the file itself states that it is too large."""
    groups = [opened.metadata.row_group(index) for index in range(opened.num_row_groups)]
    columns = [group.column(index) for group in groups for index in range(group.num_columns)]
    stated = sum(
        column.total_uncompressed_size
        for column in columns
        if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in needed)
    )
    if stated > largest:
        raise TooLargeError(f"{stated:,} bytes")


def _unpacked(column: pa.Array) -> tuple[int, int]:
    """Return the bytes that a column unpacks to, and those of its longest text."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        lengths = pc.take(pc.binary_length(column.dictionary), column.indices)
        return pc.sum(lengths).as_py() or 0, pc.max(lengths).as_py() or 0
    if pa.types.is_map(kind):
        sizes = [_unpacked(each) for each in (column.keys, column.items)]
        return sum(total for total, _ in sizes), max(most for _, most in sizes)
    if pa.types.is_nested(kind) and not pa.types.is_union(kind):
        inner = column.flatten()
        sizes = [_unpacked(each) for each in (inner if isinstance(inner, list) else [inner])]
        return sum(total for total, _ in sizes), max((most for _, most in sizes), default=0)
    return column.nbytes, 0


def _parts(batch: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a batch of ``size`` bytes in parts of about ``CONVERTED`` bytes."""
    step = max(1, batch.num_rows * CONVERTED // max(1, size))
    for start in range(0, batch.num_rows, step):
        yield batch.slice(start, step)


def _rows(batch: pa.RecordBatch) -> list[Record]:
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns[name] = column.to_pylist()
        except CONVERSION_ERRORS:
            columns[name] = [_converted(value) for value in column]
        if _has(column.type, _is_bytes):
            columns[name] = [_decoded(value) for value in columns[name]]
        if _has(column.type, _is_short):
            columns[name] = [_written(value, column.type) for value in columns[name]]
    return [{name: columns[name][row] for name in columns} for row in range(batch.num_rows)]


def _has(kind: pa.DataType, wanted: Callable[[pa.DataType], bool]) -> bool:
    """Return whether values of a type are what is wanted, or hold some."""
    if pa.types.is_dictionary(kind):
        return _has(kind.value_type, wanted)
    if pa.types.is_nested(kind):
        return any(_has(kind.field(index).type, wanted) for index in range(kind.num_fields))
    return wanted(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    )


def _is_short(kind: pa.DataType) -> bool:
    return bool(pa.types.is_float16(kind) or pa.types.is_float32(kind))


def _written(value: Any, kind: pa.DataType) -> Any:
    """Return a value with the digits that its short floats have; in Python 0.1 would have 17."""
    if isinstance(value, float) and _is_short(kind):
        short = np.float16 if pa.types.is_float16(kind) else np.float32
        return WrittenNumber.of(str(short(value)))
    if pa.types.is_dictionary(kind):
        return _written(value, kind.value_type)
    if isinstance(value, dict) and pa.types.is_struct(kind):
        return {name: _written(one, kind.field(name).type) for name, one in value.items()}
    if isinstance(value, list) and pa.types.is_map(kind):
        return [(_written(k, kind.key_type), _written(v, kind.item_type)) for k, v in value]
    if isinstance(value, list) and pa.types.is_nested(kind):
        return [_written(one, kind.value_type) for one in value]
    return value


def _decoded(value: Any) -> Any:
    """Return a value with texts for its bytes, which a file may hold as BINARY without a type."""
    if isinstance(value, list | tuple):
        return type(value)(map(_decoded, value))
    if isinstance(value, dict):
        return {key: _decoded(each) for key, each in value.items()}
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        return _not_utf8(error)


def _not_utf8(error: UnicodeDecodeError) -> Unreadable:
    return Unreadable("is not UTF-8", "save it as UTF-8", f" ({error.reason})")


def _converted(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    except CONVERSION_ERRORS as error:
        return Unreadable("cannot be read", "correct it, or drop the record", f" ({error})")

"""Find the first line, row or line of code in which two states of a file differ."""

from __future__ import annotations

import ast
import io
import json
import tokenize
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.ledger.keys import DESCRIBED

NOTHING = "nothing"
SHOWN = 120  # characters of a value
CONTEXT = 20  # characters of a long value before those that differ
UNITS = {".parquet": "row", ".jsonl": "row", ".csv": "row"}  # of other files: a line
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING)


@dataclass(frozen=True)
class ChangedValue:
    """A value that changed, as text."""

    name: str  # "params/toy.yaml seed", "artifact policy"
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.name}: was {self.before}, is {self.now}"


def shown(value: Any) -> str:
    """Return a value as text of at most SHOWN characters."""
    text = as_text(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def as_text(value: Any) -> str:
    """Return a string as it is, and anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def in_files(before: Mapping[str, bytes], now: Mapping[str, bytes]) -> ChangedValue | None:
    """Return the first difference of two states of some files, in the order of their paths.

    ``before``, ``now``: path -> content. None where nothing differs but comments and docstrings of
    sources, which are in no key of the ledger either.
    """
    for path in sorted({*before, *now}):
        if (path in before) != (path in now):
            return ChangedValue(
                path, *("a file" if path in some else NOTHING for some in (before, now))
            )
        if before[path] != now[path] and (change := in_file(path, before[path], now[path])):
            return change
    return None


def in_file(path: str, before: bytes, now: bytes) -> ChangedValue | None:
    """Return the first line or row that differs; None where all are equal.

    In Python sources it is the first line whose code differs.
    """
    suffix = Path(path).suffix
    if suffix == ".py":
        try:
            return _in_code(path, before.decode(), now.decode())
        except (SyntaxError, UnicodeDecodeError, tokenize.TokenError):
            pass  # no source that Python reads: compare its lines
    split = SPLIT.get(suffix, _lines)
    number, *pair = _first_difference(split(before), split(now))
    if number is None:
        return None
    return ChangedValue(f"{path}, {UNITS.get(suffix, 'line')} {number + 1}", *_excerpts(*pair))


def _first_difference(before: list[Any], now: list[Any]) -> tuple[int | None, str, str]:
    """Return index and both texts of the first items that differ; index None where none do."""
    for number in range(max(len(before), len(now))):
        old, new = (
            as_text(some[number]) if number < len(some) else NOTHING for some in (before, now)
        )
        if old != new:
            return number, old, new
    return None, "", ""


def _excerpts(before: str, now: str) -> tuple[str, str]:
    """Shorten two texts that differ; long ones begin shortly before the first difference."""
    begin = 0
    if max(len(before), len(now)) > SHOWN:
        shorter = min(len(before), len(now))
        same = next((i for i in range(shorter) if before[i] != now[i]), shorter)
        begin = max(0, same - CONTEXT)
    mark = "…" if begin else ""
    return mark + shown(before[begin:]), mark + shown(now[begin:])


def _lines(content: bytes) -> list[Any]:
    return content.decode(errors="replace").splitlines()


def _parquet_rows(content: bytes) -> list[Any]:
    return pq.read_table(pa.BufferReader(content)).to_pylist()


SPLIT: dict[str, Callable[[bytes], list[Any]]] = {".parquet": _parquet_rows}


# ---------------------------------------------------------------- source


def _in_code(path: str, before: str, now: str) -> ChangedValue | None:
    """Return the first line whose code differs. Raises SyntaxError for what is no Python."""
    docstrings = path.startswith(DESCRIBED)  # read at run time
    old, new = (_tokens(text, docstrings) for text in (before, now))
    position, *_ = _first_difference([text for text, _ in old], [text for text, _ in new])
    if position is None:
        return None
    lines = before.splitlines(), now.splitlines()
    at = [
        tokens[position][1] if position < len(tokens) else len(text)
        for tokens, text in zip((old, new), lines, strict=True)
    ]
    offset, *pair = _first_difference(lines[0][at[0] :], lines[1][at[1] :])
    return ChangedValue(f"{path}, line {at[1] + (offset or 0) + 1}", *_excerpts(*pair))


def _tokens(text: str, docstrings: bool) -> list[tuple[str, int]]:
    """Return the tokens of a source with the index of their line; no comments and line breaks.

    ``docstrings``: whether these are kept.
    """
    dropped = set() if docstrings else _docstring_lines(ast.parse(text))
    return [
        (token.string, token.start[0] - 1)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in NO_CODE and token.start[0] not in dropped
    ]


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that docstrings take."""
    numbers: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                numbers |= {*range(first.lineno, (first.end_lineno or first.lineno) + 1)}
    return numbers

"""Find a field in a record, and read it as text.

A field is a dotted path into a record, such as ``prompt.0.content``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tasks.questions.faults import Fault, Place, RecordError, shown

Record = dict[str, Any]

# Space at the beginning of a text; not what a lost backslash has left of a LaTeX command.
_LEADING = re.compile(r"(?:[^\S\t\r\x0b\x0c]|[\r\x0b\x0c](?![a-z]{2})|\t(?!imes|heta|frac|ext))*")


@dataclass(frozen=True)
class Unreadable:
    """Stands for a value of a record that cannot be read."""

    problem: str
    remedy: str
    detail: str


def value(record: Record, path: str, place: Place) -> Any:
    """Return a record's value at a dotted path; a number is a place in a list, -1 the last.

    A key that equals the whole (rest of the) path is preferred to the path through its parts.
    Raises RecordError with the existing fields where the path does not exist.
    """
    found: Any = record
    rest = path
    while rest:
        try:
            found, rest = _next(found, rest)
        except (KeyError, IndexError, TypeError, ValueError):
            raise RecordError(
                Fault(place, f"lacks the field '{path}'", "name the right field", "", _offer(found))
            ) from None
        if isinstance(found, Unreadable):
            raise RecordError(Fault(place, found.problem, found.remedy, path, found.detail))
    return found


def _next(found: Any, rest: str) -> tuple[Any, str]:
    """Take the first step of a path; return the value there and the rest of the path."""
    if isinstance(found, dict) and rest in found:
        return found[rest], ""
    part, _, rest = rest.partition(".")
    return (found[int(part)] if isinstance(found, list) else found[part]), rest


def text(record: Record, path: str, place: Place) -> str:
    """Return the text at a dotted path, without surrounding space; a number as ``as_text`` does.

    Raises RecordError where ``value`` does, and for a value that is empty, or no text or number.
    """
    return as_text(value(record, path, place), path, place)


def as_text(found: Any, field: str, place: Place) -> str:
    """Return a text without surrounding space, or a number in digits: 18.0 as 18, 1e-3 as 0.001.

    Windows' line ends become line feeds. Raises RecordError where the value is empty or something
    else.
    """
    if isinstance(found, int | float | Decimal) and not isinstance(found, bool):
        return _digits(Decimal(str(found)), field, place)
    if not isinstance(found, str | None):
        problem, remedy = "is no text or number", "name another field"
        raise RecordError(Fault(place, problem, remedy, field, f" but {shown(found)}"))
    text = (found or "").replace("\r\n", "\n").rstrip()
    written = _LEADING.sub("", text, count=1)
    if not written:
        raise RecordError(Fault(place, "is empty", "fill it in, or drop the record", field))
    return written


def _digits(number: Decimal, field: str, place: Place) -> str:
    if not number.is_finite():
        problem = f"is {number}, which is no number"
        raise RecordError(Fault(place, problem, "correct it, or drop the record", field))
    written = format(number, "f")
    if "." in written:
        written = written.rstrip("0").rstrip(".")
    return "0" if written == "-0" else written


def _offer(found: Any) -> str:
    """Describe the value that lacks the field."""
    if isinstance(found, dict):
        return f" (it has {sorted(found)})"
    if isinstance(found, list):
        return f" (it has a list of {len(found)} there)"
    return f" (it has {shown(found)} there, which has no fields)"

"""Find a field in a record, and read it as text.

A field is a dotted path into a record, such as ``prompt.0.content``.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from tasks.questions.faults import Fault, Place, RecordError, shown

Record = dict[str, Any]


def value(record: Record, path: str, place: Place) -> Any:
    """Return a record's value at a dotted path; a number is a place in a list, -1 the last.

    A key that equals the whole (rest of the) path is preferred to the path through its parts.
    Raises RecordError with the existing fields where the path does not exist.
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
            raise RecordError(
                Fault(place, f"lacks the field '{path}'", "name the right field", "", _offer(found))
            ) from None
    return found


def text(record: Record, path: str, place: Place) -> str:
    """Return the text at a dotted path, without surrounding space; a number as ``as_text`` does.

    Raises RecordError where ``value`` does, and for a value that is empty, or no text or number.
    """
    return as_text(value(record, path, place), path, place)


def as_text(found: Any, field: str, place: Place) -> str:
    """Return a text without surrounding space, or a number in digits: 18.0 as 18, 1e-3 as 0.001.

    Raises RecordError where the value is empty or something else.
    """
    if isinstance(found, int | float | Decimal) and not isinstance(found, bool):
        return _digits(Decimal(str(found)), field, place)
    if not isinstance(found, str | None):
        problem, remedy = "is no text or number", "name another field"
        raise RecordError(Fault(place, problem, remedy, field, f" but {shown(found)}"))
    written = (found or "").strip()
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

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

MOST_DIGITS = 400  # of a number, before and behind the point; those of floats have at most 324
# Space at the beginning of a text; not what a lost backslash has left of a LaTeX command.
_LEADING = re.compile(r"(?:[^\S\t\r\x0b\x0c]|[\r\x0b\x0c](?![a-z]{2})|\t(?!imes|heta|frac|ext))*")


class WrittenNumber(float):
    """A number that knows how it is written, whose last digits a float may not have."""

    __slots__ = ("text",)
    text: str

    @classmethod
    def of(cls, text: str) -> WrittenNumber:
        """Return the number of a text."""
        number = cls(text)
        number.text = text
        return number


@dataclass(frozen=True)
class Unreadable:
    """Stands for a value of a record that cannot be read."""

    problem: str
    remedy: str
    detail: str


def value(record: Record, path: str, location: Place) -> Any:
    """Return a record's value at a dotted path; a number is a place in a list, -1 the last.

    A key that equals the whole (rest of the) path is preferred to the path through its parts.
    Raises RecordError with the existing fields where the path does not exist.
    """
    node: Any = record
    rest = path
    while rest:
        try:
            node, rest = _next(node, rest)
        except (KeyError, IndexError, TypeError, ValueError):
            raise RecordError(
                Fault(
                    location, f"lacks the field '{path}'", "name the right field", "", _offer(node)
                )
            ) from None
        if isinstance(node, Unreadable):
            raise RecordError(Fault(location, node.problem, node.remedy, path, node.detail))
    return node


def _next(node: Any, rest: str) -> tuple[Any, str]:
    """Take the first step of a path; return the value there and the rest of the path."""
    if isinstance(node, dict) and rest in node:
        return node[rest], ""
    part, _, rest = rest.partition(".")
    return (node[int(part)] if isinstance(node, list) else node[part]), rest


def text(record: Record, path: str, location: Place) -> str:
    """Return the text at a dotted path, without surrounding space; a number as ``as_text`` does.

    Raises RecordError where ``value`` does, and for a value that is empty, or no text or number.
    """
    return as_text(value(record, path, location), path, location)


def as_text(content: Any, field: str, location: Place) -> str:
    """Return a text without surrounding space, or a number in digits: 18.0 as 18, 1e-3 as 0.001.

    Windows' line ends become line feeds. Raises RecordError where the value is empty or something
    else.
    """
    if isinstance(content, Unreadable):
        raise RecordError(Fault(location, content.problem, content.remedy, field, content.detail))
    if isinstance(content, int | float | Decimal) and not isinstance(content, bool):
        text = content.text if isinstance(content, WrittenNumber) else str(content)
        return _digits(Decimal(text), field, location)
    if not isinstance(content, str | None):
        problem, remedy = "is no text or number", "name another field"
        raise RecordError(Fault(location, problem, remedy, field, f" but {shown(content)}"))
    text = (content or "").replace("\r\n", "\n").rstrip()
    written = _LEADING.sub("", text, count=1)
    if not written:
        raise RecordError(Fault(location, "is empty", "fill it in, or drop the record", field))
    return written


def _digits(number: Decimal, field: str, location: Place) -> str:
    if not number.is_finite():
        problem = f"is {number}, which is no number"
        raise RecordError(Fault(location, problem, "correct it, or drop the record", field))
    if abs(number.adjusted()) > MOST_DIGITS:
        problem, remedy = (
            f"is {number}, which has too many digits",
            "correct it, or write it as text",
        )
        raise RecordError(Fault(location, problem, remedy, field))
    written = format(number, "f")
    if "." in written:
        written = written.rstrip("0").rstrip(".")
    return "0" if written == "-0" else written


def _offer(node: Any) -> str:
    """Describe the value that lacks the field."""
    if isinstance(node, dict):
        return f" (it has {sorted(node)})"
    if isinstance(node, list):
        return f" (it has a list of {len(node)} there)"
    return f" (it has {shown(node)} there, which has no fields)"

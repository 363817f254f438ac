"""Faults of records in the user's files: a run collects all of them before it stops or goes on."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.trees.words import printable

Place = str  # of a record, for messages: "data/sources/mine/train.jsonl, line 3"

SHOWN = 60  # characters of a value in a message
MOST_GROUPS = 25  # faults of one kind are shown as one group
MOST_ROWS = 3  # of a group


@dataclass(frozen=True)
class Fault:
    """Why a record cannot be used, and what to do about it.

    ``problem`` has the same words for every record with this fault, so that they can be counted;
    ``detail`` follows it and has the value. ``field`` is a dotted path, or "" for the whole record.
    A file that cannot be read at all has no place, and all that is to say in ``problem``.
    """

    place: Place
    problem: str
    remedy: str
    field: str = ""
    detail: str = ""
    question_id: str = ""

    def __str__(self) -> str:
        if not self.place:
            return self.problem
        field = f": the field '{self.field}'" if self.field else ""
        return printable(f"{self.place}{field} {self.problem}{self.detail}: {self.remedy}")


class RecordError(ValueError):
    """A record cannot be used."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


def unreadable(error: ValueError) -> Fault:
    """Return the fault of a file that cannot be read; it stops every run."""
    return Fault("", str(error), "")


def shown(content: object) -> str:
    """Return a value in Python's spelling, shortened and printable."""
    written = repr(content)
    short = printable(written[: SHOWN + 1])
    return short if len(short) <= SHOWN else f"{short[:SHOWN]}..."


def summary(faults: Collection[Fault]) -> str:
    """Describe the faults, a line for each file, field and problem, with the first rows."""
    groups: dict[tuple[str, str, str], list[Fault]] = {}
    for fault in faults:
        groups.setdefault((_file(fault), fault.field, fault.problem), []).append(fault)
    ordered = sorted(groups.values(), key=len, reverse=True)
    lines = [_line(group) for group in ordered[:MOST_GROUPS]]
    hidden = ordered[MOST_GROUPS:]
    if hidden:
        lines.append(f"- and {sum(map(len, hidden)):,} faults of {len(hidden):,} more kinds")
    return "\n".join(lines)


def _line(group: Sequence[Fault]) -> str:
    """Describe the faults of one kind: "- a.jsonl: the field 'q' is empty in 3 records (...)"."""
    first = group[0]
    if not first.place:
        return f"- {first.problem}"
    field = f": the field '{first.field}'" if first.field else ""
    rows = "; ".join(f"{_row(fault)}{fault.detail}" for fault in group[:MOST_ROWS])
    more = "; ..." if len(group) > MOST_ROWS else ""
    records = f"{len(group):,} record{'s' if len(group) > 1 else ''}"
    words = f"- {_file(first)}{field} {first.problem} in {records} ({rows}{more}): {first.remedy}"
    return printable(words)


def _file(fault: Fault) -> str:
    return fault.place.rpartition(", ")[0] or fault.place


def _row(fault: Fault) -> str:
    return fault.place.rpartition(", ")[2]


def write_list(faults: Collection[Fault], file: Path) -> None:
    """Write all faults as JSON lines: file, row, field, problem, value and remedy."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("w", encoding="utf-8") as lines:
        for fault in faults:
            entry = {
                "file": _file(fault),
                "row": _row(fault),
                "field": fault.field,
                "problem": fault.problem,
                "value": fault.detail.removeprefix(": "),
                "remedy": fault.remedy,
            }
            entry = {name: printable(text) for name, text in entry.items()}
            lines.write(json.dumps(entry, ensure_ascii=False) + "\n")
    partial.replace(file)

"""Read new training questions from files that anyone may put into a folder at any time.

Every run reads every file of the folder, so a run depends on which files are there and not on when
they came. A file with a fault, a question that is too long among them, is refused as a whole and
named, and the run continues without it: one bad file must not stop the others, and half of a file
would look like all of it. Where the recipe says ``faulty: drop``, only the faulty records are left
out. So no regular file in the folder stops a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from params.schema.benchmarks import Benchmark
from tasks.questions.benchmarks import apart, distinct
from tasks.questions.entries import Entry, Problems, question_of, read_entries
from tasks.questions.experts import Dropped
from tasks.questions.faults import Fault, summary
from tasks.questions.stored import Stored, chained, mapped, where
from tasks.trees.tree import Question
from tasks.trees.words import printable

TooLong = Callable[[Sequence[Entry]], list[Fault]]  # a fault for each question that is too long

REFUSED = "intake_file_refused"  # the reason of a refused file


@dataclass(frozen=True)
class Delivery:
    """The questions of the folder, the refused files, and records that are left out."""

    entries: Stored[Entry]
    refused: list[Dropped]  # each with its faults
    faults: list[Fault]
    long: list[Fault]


def files(folder: Path) -> list[Path]:
    """Return the delivered files, without hidden files and DVC's own (.dvc)."""
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir())
    inner = {path: path.relative_to(folder) for path in paths}
    return [
        path
        for path, name in inner.items()
        if path.suffix != ".dvc" and not any(part.startswith(".") for part in name.parts)
    ]


def read(
    folder: Path,
    kind: str,
    settings: Benchmark,
    problems: Problems,
    too_long: TooLong,
    *,
    drop: bool,
) -> Delivery:
    """Read all files of ``folder``; ``settings`` define the fields of a record.

    A question's id is "intake", its file's path in the folder, and the number of the record.
    ``drop``: whether to leave out faulty records alone, instead of their files.
    """
    delivery = Delivery(Stored(), [], [], [])
    for file in files(folder):
        name = printable(file.relative_to(folder).as_posix())
        try:
            if not str(file).isprintable():
                raise ValueError(f"{name}: the file's name cannot be printed: rename it")
            loaded = read_entries(file, settings, kind, f"intake-{name}", problems)
            long = too_long(loaded.entries)
            if (loaded.faults or long) and not drop:
                raise ValueError(summary([*loaded.faults, *long]))
        except (ValueError, OSError) as error:
            delivery.refused.append(Dropped(name, REFUSED, str(error)))
            continue
        left_out = {fault.question_id for fault in long}
        delivery.entries.extend(e for e in loaded.entries if e.question.id not in left_out)
        delivery.faults.extend(loaded.faults)
        delivery.long.extend(long)
    return delivery


def new_questions(
    delivery: Delivery, train: Sequence[Question], held_out: Sequence[Question], words: int
) -> tuple[Sequence[Question], list[Dropped]]:
    """Split the delivered questions into new ones, and the others with their reasons.

    Duplicates of any question are not new, nor are questions that share ``words`` words in a row
    with a held-out one.
    """
    if not delivery.entries:
        return [], [*delivery.refused]
    known = mapped(_entry, chained(train, held_out))
    unique_entries, duplicates = distinct(chained(known, delivery.entries))
    delivered = {entry.question.id for entry in delivery.entries}
    is_new = (entry.question.id in delivered for entry in unique_entries)
    fresh, overlapping = apart(
        where(unique_entries, np.fromiter(is_new, bool, len(unique_entries))),
        mapped(_entry, held_out),
        words,
    )
    left_out = [each for each in duplicates if each.question_id in delivered]
    return mapped(question_of, fresh), [*delivery.refused, *left_out, *overlapping]


def _entry(question: Question) -> Entry:
    return Entry(question, None)

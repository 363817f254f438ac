"""What must hold of the questions before anything learns from them or is measured on them.

Columns: id (str), split ("train", "validation" or "test"), kind (str), text (str),
answers (list[str], the accepted forms of the gold answer).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pandas as pd

from tasks.gate import Expectation, among, between, sum_between, unique, unusable

COLUMNS = ("id", "split", "kind", "text", "answers")
SPLITS = ("train", "validation", "test")

# Line feeds and tabs may stand in a question; other control characters and the replacement
# character show that it was damaged on the way.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffd]")
REMAINS = re.compile(r"<\|\w{2,}\|>|\{%|\A\s*(?:none|nan|null)\s*\Z", re.IGNORECASE)
# LaTeX is full of braces, so these count only in a text without a backslash.
PLACEHOLDERS = re.compile(r"\{\{|(?<![\^_])\{[A-Za-z_]\w*\}")


def prepare(table: pd.DataFrame) -> pd.DataFrame:
    """Add the columns that ``expectations`` judges; ValueError for one that the table lacks."""
    table = table.reset_index(drop=True)
    faults = unusable("questions", table, COLUMNS)
    normalised = table["text"].astype("str").str.casefold().str.split().str.join(" ")
    return table.assign(
        unusable=faults,
        text_fault=table["text"].map(text_fault),
        answers_fault=table["answers"].map(answers_fault),
        normalised_text=normalised,
        splits_of_text=table.groupby(normalised)["split"].transform("nunique"),
        **{f"in_{split}": (table["split"] == split).astype(int) for split in SPLITS},
    ).set_index("id", drop=False)


def expectations(
    kinds: Collection[str] | None = None, rows: Mapping[str, int] | None = None
) -> list[Expectation]:
    """``kinds``: the known kinds; ``rows``: how many questions each split must have, if known."""
    known_kinds = [among("the kind is known", "kind", kinds)] if kinds else []
    return [
        among("every value is present", "unusable", [""]),
        unique("no id occurs twice", "id"),
        among("the split is train, validation or test", "split", SPLITS),
        *(_size(split, rows) for split in SPLITS),
        *known_kinds,
        among("the text is not empty, damaged or a template's remains", "text_fault", [""]),
        between("no text lies in two splits", "splits_of_text", 1, 1),
        unique("no text occurs twice", "normalised_text"),
        among("the answers are a list of texts, none empty", "answers_fault", [""]),
    ]


def _size(split: str, rows: Mapping[str, int] | None) -> Expectation:
    if rows is None:
        return sum_between(f"the {split} split has questions", f"in_{split}", 1, None)
    count = rows[split]
    return sum_between(f"the {split} split has {count} questions", f"in_{split}", count, count)


def text_fault(text: Any) -> str:
    """What is wrong with a question's text; "" if nothing."""
    if not isinstance(text, str) or not text.strip():
        return "empty"
    if control := CONTROL.search(text):
        return f"control character U+{ord(control[0]):04X}"
    remains = REMAINS.search(text) or ("\\" not in text and PLACEHOLDERS.search(text))
    return f"template remains {remains[0]!r}" if remains else ""


def answers_fault(answers: Any) -> str:
    """What is wrong with a question's accepted answers; "" if nothing."""
    if not isinstance(answers, list | tuple | np.ndarray):
        return "not a list"
    if not len(answers):
        return "no answer"
    usable = all(isinstance(answer, str) and answer.strip() for answer in answers)
    return "" if usable else "an empty answer"

"""Expectations of the table of questions, checked before training and evaluation use them.

Columns: id (str), split ("train", "validation" or "test"), kind (str), text (str),
answers (list[str], the accepted forms of the gold answer), scorer (str, the name of the scorer that
compares an answer with them), before (list of Message, which precede the text in the prompt); data
(str) of tasks in a world. These need no answers, and may share a text but not their data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tasks.gates.answers import answer_problem, boxed_answer
from tasks.gates.gate import Expectation, among, between, legible, sum_between, unique, unusable
from tasks.gates.texts import lost_command, lost_fault, lost_remedy, prose_fault
from tasks.trees.tree import Message, Question
from tasks.trees.words import overlaps, printable

# (answer, accepted forms) -> breakdown with "score"; kind of scorer -> scorer
Scorers = Mapping[str, Callable[[str, Sequence[str]], Mapping[str, float]]]

NAMES = ("id", "split", "kind", "scorer")
COLUMNS = (*NAMES, "text", "answers", "before")
SPLITS = ("train", "validation", "test")
ROLES = ("system", "user", "assistant")

# A missing value that was converted to text.
MISSING = re.compile(r"\s*(?:none|nan|null|<na>)\s*", re.IGNORECASE)

SHOWN = 60  # characters of a value in a problem
NO_ANSWER = "no answer"


class Problem(NamedTuple):
    """What is wrong with one part of a question: "text", "answers", or "before.0" and so on."""

    part: str
    words: str  # the same for every question that has the problem
    detail: str  # the value, to follow the words
    remedy: str


def problems(question: Question, scorers: Scorers) -> list[Problem]:
    """Return all that is wrong with a question from the user's files."""
    messages = {"text": question.text}
    messages |= {f"before.{n}": message.content for n, message in enumerate(question.before)}
    found = [
        _text_problem(part, text, fault)
        for part, text in messages.items()
        if (fault := text_fault(text))
    ]
    return [*found, *_answers_problems(question, scorers)]


def _text_problem(part: str, text: str, fault: str) -> Problem:
    words = f"is {fault}" if fault == "empty" else f"has {fault}"
    if command := lost_command(text):
        return Problem(part, words, f" (of {command})", lost_remedy(command))
    return Problem(part, words, "", "correct the record, or drop it")


def _answers_problems(question: Question, scorers: Scorers) -> list[Problem]:
    found = [
        Problem("answers", problem.words, f": {printable(answer[:SHOWN])!r}", problem.remedy)
        for answer in question.answers
        if (problem := answer_problem(answer))
    ]
    if found or not (fault := score_fault(question.scorer, question.answers, scorers)):
        return found
    words = f"scores less than 1 against itself with {question.scorer}"
    return [Problem("answers", words, f": {fault}", "correct it, or choose another scorer")]


def prepare(table: pd.DataFrame, scorers: Scorers, words: int) -> pd.DataFrame:
    """Add the columns that ``expectations`` check. Raises ValueError for a missing column.

    words: a training question that shares that many words in a row with a question of validation or
    test overlaps it (tasks/trees/words.py).
    """
    table = table.reset_index(drop=True)
    table = table.assign(
        unusable=unusable("questions", table, COLUMNS, NAMES), **legible(table, NAMES)
    )
    data = table["data"] if "data" in table else pd.Series([""] * len(table))
    in_world = data.map(bool)
    texts = [text if isinstance(text, str) else "" for text in table["text"]]
    normalised = pd.Series([printable(" ".join(text.casefold().split())) for text in texts])
    normalised = normalised.where(~in_world, normalised + " " + data.astype(str))
    texts = ["" if world else text for text, world in zip(texts, in_world, strict=True)]
    answers_faults = table["answers"].map(answers_fault)
    answers_faults = answers_faults.mask(in_world & (answers_faults == NO_ANSWER), "")
    return table.assign(
        text_fault=table["text"].map(text_fault),
        before_fault=table["before"].map(before_fault),
        answers_fault=answers_faults,
        score_fault=_score_faults(table, answers_faults, scorers),
        normalised_text=normalised,
        splits_of_text=table.groupby(normalised)["split"].transform("nunique"),
        overlaps=_overlaps(table, texts, words),
        **{f"in_{split}": (table["split"] == split).astype(int) for split in SPLITS},
    ).set_index("id", drop=False)


def expectations(
    kinds: Collection[str] | None = None, rows: Mapping[str, int] | None = None
) -> list[Expectation]:
    """Return the expectations; ``rows``: how many questions each split must have, if known.

    kinds: the known kinds of questions.
    """
    known_kinds = [among("the kind is known", "kind", kinds)] if kinds else []
    return [
        among("every value is present, ids and kinds are printable", "unusable", [""]),
        unique("no id occurs twice", "id"),
        among("the split is train, validation or test", "split", SPLITS),
        *(_size(split, rows) for split in SPLITS),
        *known_kinds,
        among("the text is not empty, damaged or a template's remains", "text_fault", [""]),
        among("the messages before the text are sound, too", "before_fault", [""]),
        between("no text lies in two splits", "splits_of_text", 1, 1),
        unique("no text occurs twice", "normalised_text"),
        among("no training question overlaps one of validation or test", "overlaps", [""]),
        among("the answers are a list of sound texts, none empty", "answers_fault", [""]),
        among("the question's own scorer gives each answer score 1", "score_fault", [""]),
    ]


def _size(split: str, rows: Mapping[str, int] | None) -> Expectation:
    if rows is None:
        return sum_between(f"the {split} split has questions", f"in_{split}", 1, None)
    count = rows[split]
    return sum_between(f"the {split} split has {count} questions", f"in_{split}", count, count)


def text_fault(text: Any) -> str:
    """Describe what is wrong with a question's text, or return ""."""
    if not isinstance(text, str):
        return f"not a text but {type(text).__name__}"
    if not text.strip():
        return "empty"
    if MISSING.fullmatch(text):
        return f"template remains {text!r}"
    return prose_fault(text) or lost_fault(text)


def before_fault(messages: Any) -> str:
    """Describe what is wrong with the messages before a question's text, or return ""."""
    if not isinstance(messages, list | tuple | np.ndarray):
        return "not a list"
    for number, message in enumerate(messages):
        if not isinstance(message, Message):
            return f"message {number} is no message but {type(message).__name__}"
        if message.role not in ROLES:
            return f"message {number} has the role {message.role!r}"
        if fault := text_fault(message.content):
            return f"message {number} of {message.role}: {fault}"
    return ""


def answers_fault(answers: Any) -> str:
    """Describe what is wrong with a question's accepted answers, or return ""."""
    if not isinstance(answers, list | tuple | np.ndarray):
        return "not a list"
    if not len(answers):
        return NO_ANSWER
    for answer in answers:
        if not isinstance(answer, str):
            return f"not a text but {type(answer).__name__}"
        if problem := answer_problem(answer):
            return f"{printable(answer[:SHOWN])!r} {problem.words}"
    return ""


def _score_faults(table: pd.DataFrame, known: pd.Series, scorers: Scorers) -> list[str]:
    """Return the score fault of each question, or ""; equal answers are scored once.

    known: other faults of the answers; those with one are not scored.
    """
    seen: dict[tuple[str, tuple[str, ...]], str] = {}
    faults = []
    for scorer, answers, fault in zip(table["scorer"], table["answers"], known, strict=True):
        if fault:
            faults.append("")
            continue
        case = (scorer, tuple(answers))
        if case not in seen:
            seen[case] = score_fault(*case, scorers)
        faults.append(seen[case])
    return faults


def score_fault(scorer: str, answers: Sequence[str], scorers: Scorers) -> str:
    """Describe the first accepted answer that ``scorer`` does not score 1, or return "".

    The answer is read from the response that gives it, as a reward reads it.
    """
    if scorer not in scorers:
        return f"unknown scorer {scorer!r}; known are {', '.join(sorted(scorers))}"
    for answer in answers:
        given = boxed_answer(answer) or ""
        # alone first: the comparison with all others makes many forms slow
        score = scorers[scorer](given, [answer])["score"]
        if score != 1:
            score = scorers[scorer](given, answers)["score"]
        if score != 1:
            return f"{printable(answer[:SHOWN])!r} scores {score} with {scorer}"
    return ""


def _overlaps(table: pd.DataFrame, texts: Sequence[str], words: int) -> np.ndarray:
    """Return the id of the held-out question that each training question overlaps, or ""."""
    splits, ids = list(table["split"]), list(table["id"])
    training = [row for row, split in enumerate(splits) if split == "train"]
    held_out = [
        row for row, split in enumerate(splits) if split in ("validation", "test") and texts[row]
    ]
    found = np.full(len(table), "", dtype=object)
    pairs = overlaps([texts[row] for row in training], [texts[row] for row in held_out], words)
    found[training] = ["" if index is None else ids[held_out[index]] for index in pairs]
    return found

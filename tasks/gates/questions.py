"""Expectations of the table of questions, checked before training and evaluation use them.

Columns: id (str), split ("train", "validation" or "test"), kind (str), text (str),
answers (list[str], the accepted forms of the gold answer), scorer (str, the name of the scorer that
compares an answer with them), before (list of Message, which precede the text in the prompt); data
(str) of tasks in a world. These need no answers, and may share a text but not their data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api.types import union_categoricals

from tasks.gates.answers import answer_problem, boxed_answer
from tasks.gates.gate import Expectation, among, between, legible, sum_between, unusable
from tasks.gates.texts import lost_command, lost_fault, lost_remedy, prose_fault
from tasks.trees.tree import Message, Question
from tasks.trees.words import DIGEST_BYTES, asked, digest, overlaps, printable, told_by_many

# (answer, accepted forms) -> breakdown with "score"; kind of scorer -> scorer
Scorers = Mapping[str, Callable[[str, Sequence[str]], Mapping[str, float]]]

NAMES = ("id", "split", "kind", "scorer")
COLUMNS = (*NAMES, "text", "answers", "before")
SPLITS = ("train", "validation", "test")
ROLES = ("system", "user", "assistant")

# A missing value that was converted to text.
MISSING = re.compile(r"\s*(?:none|nan|null|<na>)\s*", re.IGNORECASE)

MOST_SCORED = 2**14  # different answers whose scores are remembered
SHOWN = 60  # characters of a value in a problem
NO_ANSWER = "no answer"


class QuestionFault(NamedTuple):
    """What is wrong with one part of a question: "text", "answers", or "before.0" and so on."""

    part: str
    words: str  # the same for every question that has the problem
    detail: str  # the value, to follow the words
    remedy: str


def problems(question: Question, scorers: Scorers) -> list[QuestionFault]:
    """Return all that is wrong with a question from the user's files."""
    messages = {"text": question.text}
    messages |= {f"before.{n}": message.content for n, message in enumerate(question.before)}
    text_problems = [
        _text_problem(part, text, fault)
        for part, text in messages.items()
        if (fault := text_fault(text))
    ]
    return [*text_problems, *_answers_problems(question, scorers)]


def _text_problem(part: str, text: str, fault: str) -> QuestionFault:
    words = f"is {fault}" if fault == "empty" else f"has {fault}"
    if command := lost_command(text):
        return QuestionFault(part, words, f" (of {command})", lost_remedy(command))
    return QuestionFault(part, words, "", "correct the record, or drop it")


def _answers_problems(question: Question, scorers: Scorers) -> list[QuestionFault]:
    answer_problems = [
        QuestionFault("answers", problem.words, f": {printable(answer[:SHOWN])!r}", problem.remedy)
        for answer in question.answers
        if (problem := answer_problem(answer))
    ]
    if answer_problems or not (fault := score_fault(question.scorer, question.answers, scorers)):
        return answer_problems
    words = f"scores less than 1 against itself with {question.scorer}"
    return [QuestionFault("answers", words, f": {fault}", "correct it, or choose another scorer")]


def prepare(
    tables: pd.DataFrame | Iterable[pd.DataFrame], scorers: Scorers, words: int
) -> pd.DataFrame:
    """Return the columns that ``expectations`` check. Raises ValueError for a missing column.

    tables: the questions, in one or in several tables, which are gone through again and again.
    words: a training question that shares that many words in a row with a question of validation or
    test overlaps it (tasks/trees/words.py).
    The columns ``id`` and ``normalised_text`` have only what occurs more than once, else "".
    """
    tables = [tables] if isinstance(tables, pd.DataFrame) else tables
    scored = lru_cache(MOST_SCORED)(partial(score_fault, scorers=scorers))
    parts = [_columns(table, scored) for table in tables]
    whole = {name: _joined([part.pop(name) for part in parts]) for name in list(parts[0])}
    same_id, _ = _repeated(whole.pop("digest_of_id"))
    same_text, which_text = _repeated(whole.pop("digest_of_text"))
    table = pd.DataFrame(whole)
    same_id &= table["id"].notna().to_numpy()
    checked = table.assign(
        id=_only(table["id"], same_id),
        normalised_text=_repeated_texts(tables, same_text),
        splits_of_text=_splits_of_text(table["split"], which_text),
        overlaps=_overlaps(tables, table["split"], words),
        **{f"in_{split}": (table["split"] == split).astype(np.int8) for split in SPLITS},
    )
    return checked.set_index(pd.Index(table["id"], name="id"))


def _columns(table: pd.DataFrame, scored: Callable[..., str]) -> dict[str, Any]:
    """Return the columns that depend on one question each, of a portion of the table.

    Texts that few rows have are categories, so that a row takes one byte and no text.
    """
    table = table.reset_index(drop=True)
    faults = unusable("questions", table, COLUMNS, NAMES)
    names = legible(table, NAMES)
    answers_faults = table["answers"].map(answers_fault)
    answers_faults = answers_faults.mask(_in_world(table) & (answers_faults == NO_ANSWER), "")
    few: dict[str, Any] = {
        "split": names["split"],
        "kind": names["kind"],
        "unusable": faults,
        "text_fault": table["text"].map(text_fault),
        "before_fault": table["before"].map(before_fault),
        "answers_fault": answers_faults,
        "score_fault": _score_faults(table, answers_faults, scored),
    }
    return {
        "id": names["id"].astype("str"),
        "digest_of_id": _digests(map(str, names["id"])),
        "digest_of_text": _digests(_normalised(table)),
        **{name: pd.Categorical(values) for name, values in few.items()},
    }


def _digests(texts: Iterable[str]) -> NDArray[np.bytes_]:
    return np.array([digest(text) for text in texts], f"S{DIGEST_BYTES}")


def _in_world(table: pd.DataFrame) -> pd.Series:
    return table["data"].map(bool) if "data" in table else pd.Series(False, table.index)


def _normalised(table: pd.DataFrame) -> list[str]:
    """Return the texts without case and surplus space, after what was said before them.

    In a world they have what they start from.
    """
    texts = [
        printable(" ".join(_chat(before, text).casefold().split())) if isinstance(text, str) else ""
        for before, text in zip(table["before"], table["text"], strict=True)
    ]
    if "data" not in table:
        return texts
    return [
        f"{text} {data}" if data else text for text, data in zip(texts, table["data"], strict=True)
    ]


def _chat(before: Any, text: str) -> str:
    """Return what is asked, in all messages of a prompt; the text alone where there are none."""
    return asked(before, text) if is_chat(before) else text


def _joined(parts: list[Any]) -> Any:
    """Return the parts of a column, one after another."""
    if isinstance(parts[0], pd.Categorical):
        return union_categoricals(parts)
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return pd.concat(parts, ignore_index=True)


def _repeated(digests_N: NDArray[np.bytes_]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which values occur more than once, and a number for each different value. [N]"""
    _, which_N, counts = np.unique(digests_N, return_inverse=True, return_counts=True)
    return counts[which_N] > 1, which_N


def _only(values: pd.Series, flags_N: NDArray[np.bool_]) -> pd.Categorical:
    """Return the values whose flag is true, and "" for the others."""
    column = np.full(len(values), "", dtype=object)
    column[flags_N] = values[flags_N]
    return pd.Categorical(column)


def _repeated_texts(tables: Iterable[pd.DataFrame], twice_N: NDArray[np.bool_]) -> pd.Categorical:
    """Return the texts that occur more than once, and "" for the others."""
    texts = np.full(len(twice_N), "", dtype=object)
    first = 0
    for table in tables if twice_N.any() else ():
        flags = twice_N[first : first + len(table)]
        texts[first : first + len(table)][flags] = list(compress(_normalised(table), flags))
        first += len(table)
    return pd.Categorical(texts)


def _splits_of_text(splits: pd.Series, which_N: NDArray[np.int64]) -> NDArray[np.int8]:
    """Return the number of splits in which the text of each question lies."""
    codes_N = splits.cat.codes.to_numpy()
    pairs = np.unique(np.stack([which_N, codes_N])[:, codes_N >= 0], axis=1)
    return np.bincount(pairs[0], minlength=which_N.max(initial=0) + 1)[which_N].astype(np.int8)


def expectations(
    kinds: Collection[str] | None = None, rows: Mapping[str, int] | None = None
) -> list[Expectation]:
    """Return the expectations; ``rows``: how many questions each split must have, if known.

    kinds: the known kinds of questions.
    """
    known_kinds = [among("the kind is known", "kind", kinds)] if kinds else []
    return [
        among("every value is present, ids and kinds are printable", "unusable", [""]),
        among("no id occurs twice", "id", [""]),
        among("the split is train, validation or test", "split", SPLITS),
        *(_size(split, rows) for split in SPLITS),
        *known_kinds,
        among("the text is not empty, damaged or a template's remains", "text_fault", [""]),
        among("the messages before the text are sound, too", "before_fault", [""]),
        between("no text lies in two splits", "splits_of_text", 1, 1),
        among("no text occurs twice", "normalised_text", [""]),
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


def _score_faults(table: pd.DataFrame, known: pd.Series, scored: Callable[..., str]) -> list[str]:
    """Return the score fault of each question, or "".

    known: other faults of the answers; those with one are not scored. scored: returns the fault of
    a scorer's answers.
    """
    return [
        "" if fault else scored(scorer, tuple(answers))
        for scorer, answers, fault in zip(table["scorer"], table["answers"], known, strict=True)
    ]


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


def _overlaps(tables: Iterable[pd.DataFrame], splits: pd.Series, words: int) -> pd.Categorical:
    """Return the id of the held-out question that each training question overlaps, or ""."""
    held_out = ("validation", "test")
    shared = told_by_many(
        before
        for table in tables
        for split, before in zip(table["split"], table["before"], strict=True)
        if split in held_out and is_chat(before)
    )
    rows = [
        (identity, text)
        for split, identity, text in _texts(tables, shared)
        if split in held_out and text
    ]
    training = (text for split, _, text in _texts(tables, shared) if split == "train")
    pairs = overlaps(training, [text for _, text in rows], words)
    ids = np.full(len(splits), "", dtype=object)
    ids[(splits == "train").to_numpy()] = [
        "" if index is None else rows[index][0] for index in pairs
    ]
    return pd.Categorical(ids)


def _texts(
    tables: Iterable[pd.DataFrame], shared: Collection[str]
) -> Iterator[tuple[Any, Any, str]]:
    """Yield split, id and what is asked; tasks in a world may share their text: ""."""
    for table in tables:
        columns = (table[name] for name in ("split", "id", "text", "before"))
        for split, identity, text, before, world in zip(*columns, _in_world(table), strict=True):
            sound = isinstance(text, str) and is_chat(before)
            yield split, identity, asked(before, text, shared) if sound and not world else ""


def is_chat(before: Any) -> bool:
    """Return whether a value is a sequence of messages, such as a sound table has."""
    listed = isinstance(before, list | tuple | np.ndarray)
    return listed and all(isinstance(message, Message) for message in before)

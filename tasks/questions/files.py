"""Questions and SFT traces from the user's own files: JSON lines, one object a line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from params.schema import FileQuestions
from tasks.trajectory import Question

_RESULT = re.compile(r"(<result>.*?</result>)", re.DOTALL)


def load(settings: FileQuestions) -> dict[str, list[Question]]:
    """The questions of each split; ids are split and line.

    Raises ValueError that names file, line, field and remedy for a file that is missing or empty, a
    line that is not JSON, a field that is missing or empty.
    """
    files = {"train": settings.train, "validation": settings.validation, "test": settings.test}
    return {
        split: [
            Question(
                id=f"{split}-{line:05d}",
                kind=file.stem,
                text=_text(entry, settings.question_field, file, line),
                answers=(_text(entry, settings.answer_field, file, line),),
            )
            for line, entry in objects(file)
        ]
        for split, file in files.items()
    }


def load_traces(
    settings: FileQuestions, questions: list[Question]
) -> Iterator[tuple[Question, list[tuple[str, bool]]]]:
    """SFT traces: the question, and its response cut into (turn, True) and (tool result, False).

    Raises ValueError like ``load``, and for a trace whose question is not a training question.
    """
    by_text = {question.text: question for question in questions}
    for line, entry in objects(settings.traces):
        text = _text(entry, settings.question_field, settings.traces, line)
        if text not in by_text:
            raise ValueError(
                f"{settings.traces}, line {line}: the question {text[:60]!r} is not in "
                f"{settings.train}: add it there, or drop the trace"
            )
        response = _text(entry, settings.response_field, settings.traces, line)
        parts = [part for part in _RESULT.split(response) if part]
        yield by_text[text], [(part, not part.startswith("<result>")) for part in parts]


def objects(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers, from 1, and the objects on them; blank lines are skipped."""
    if not file.is_file():
        raise ValueError(f"{file} does not exist: correct the path in prepare.questions")
    found = False
    for line, text in enumerate(_lines(file), start=1):
        if not text.strip():
            continue
        try:
            entry = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{file}, line {line} is not JSON ({error.msg}): one object a line is expected"
            ) from None
        if not isinstance(entry, dict):
            raise ValueError(f"{file}, line {line} is no object: {text[:60]!r}")
        found = True
        yield line, entry
    if not found:
        raise ValueError(f"{file} is empty: it needs at least one question")


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 ({error.reason}): save it as UTF-8") from None


def _text(entry: dict[str, Any], field: str, file: Path, line: int) -> str:
    if field not in entry:
        raise ValueError(
            f"{file}, line {line} lacks the field '{field}': it has {sorted(entry)}; name the "
            "right field in prepare.questions"
        )
    value = entry[field]
    if isinstance(value, bool | list | dict):
        raise ValueError(f"{file}, line {line}: the field '{field}' is no text or number: {value}")
    value = "" if value is None else str(value).strip()
    if not value:
        raise ValueError(f"{file}, line {line}: the field '{field}' is empty")
    return value

"""Read the records of a file as questions, by a row of params/benchmarks.yaml."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from params.schema.benchmarks import BY_FIELD, Benchmark
from tasks.questions.encrypted import DECODER_FIELDS, decrypted
from tasks.questions.faults import Fault, Place, RecordError, shown
from tasks.questions.fields import Record, as_text, text, value
from tasks.questions.record_files import rows
from tasks.questions.stored import Stored
from tasks.trees import dialogue
from tasks.trees.tree import Message, Question

# (part, problem, detail, remedy); a part is "text", "answers" or "before.0" for the first message
# before the text
Problem = tuple[str, str, str, str]
Problems = Callable[[Question], Iterable[Problem]]

ROLES = ("system", "user", "assistant")
UNREAD = "(unread)"  # stands for a question that cannot be read
TRUTH = {True: "yes", False: "no"}
BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
UNBRACED = re.compile(r"[^\s$]+")  # what is in a box without braces: \boxed 5$


@dataclass(frozen=True)
class Entry:
    """A record of a set: its question, its worked solution (or None), and its place in the file."""

    question: Question
    solution: str | None
    place: Place = ""


def question_of(entry: Entry) -> Question:
    """Return the question of an entry."""
    return entry.question


def places_in(entries: Iterable[Entry], ids: Collection[str]) -> dict[str, Place]:
    """Return the places of the entries whose questions have these ids."""
    return {entry.question.id: entry.place for entry in entries if entry.question.id in ids}


@dataclass(frozen=True)
class Loaded:
    """The records of files: sound ones, the faults of the others, and those that are questions."""

    entries: Stored[Entry] = field(default_factory=Stored)
    faults: list[Fault] = field(default_factory=list)
    unsound: list[Entry] = field(default_factory=list)

    def extend(self, other: Loaded) -> None:
        """Append the records of another file."""
        self.entries.extend(other.entries)
        self.faults.extend(other.faults)
        self.unsound.extend(other.unsound)


def read_entries(
    file: Path,
    settings: Benchmark,
    kind: str,
    prefix: str,
    problems: Problems,
    *,
    solutions: bool = False,
) -> Loaded:
    """Read the records of a file as questions of a kind, with ids of a prefix and a number from 1.

    Raises ValueError for a file that cannot be read, or of which ``settings.only`` leaves nothing.
    """
    loaded = Loaded()
    encrypted = _texts(settings, solutions)
    needed = _fields(settings, encrypted)
    left_out = 0
    for number, (location, row) in enumerate(rows(file, settings.records, needed), start=1):
        identity = f"{prefix}-{number:05d}"
        try:
            record = _opened(row, settings, encrypted, location)
        except RecordError as error:
            loaded.faults.append(replace(error.fault, question_id=identity))
            continue
        if record is None:
            left_out += 1
            continue
        entry, faults = _read_entry(record, settings, kind, identity, location, solutions)
        faults += _problems(entry, record, settings, problems)
        if not faults:
            loaded.entries.append(entry)
        elif entry.question.text != UNREAD:
            loaded.unsound.append(entry)
        loaded.faults.extend(replace(fault, question_id=identity) for fault in faults)
    if left_out and not (loaded.entries or loaded.faults):
        raise ValueError(
            f"{file} has {left_out:,} records, and none with {settings.only}: correct `only` in "
            "the set's row of params/benchmarks.yaml"
        )
    return loaded


def _texts(settings: Benchmark, solutions: bool) -> list[str]:
    """Return the fields of a record that become texts of its question."""
    solution = settings.solution if solutions else None
    paths = (settings.question, settings.answer, settings.aliases, solution)
    return list(dict.fromkeys(path for path in paths if path))


def _fields(settings: Benchmark, texts: Sequence[str]) -> list[str]:
    """Return all fields of a record that are read."""
    scorer = [] if isinstance(settings.scorer, str) else [settings.scorer[BY_FIELD]]
    keys = DECODER_FIELDS[settings.decode] if settings.decode else ()
    return [*texts, *scorer, *(settings.only or {}), *keys]


def _opened(
    row: Record | Fault, settings: Benchmark, encrypted: Sequence[str], location: Place
) -> Record | None:
    """Return a record that can be read, or None for one that ``settings.only`` leaves out.

    Raises RecordError for a record that is a fault, lacks a field or cannot be decrypted.
    """
    if isinstance(row, Fault):
        raise RecordError(row)
    for path, required_text in (settings.only or {}).items():
        if required_text != _present(row, path, location):
            return None
    if settings.decode is None:
        return row
    return decrypted(row, settings.decode, encrypted, location)


def _present(record: Record, path: str, location: Place) -> str:
    """Return a value of any kind as text, an empty or missing one as ""."""
    content = value(record, path, location)
    if content is None or (isinstance(content, str) and not content.strip()):
        return ""
    return as_text(TRUTH[content] if isinstance(content, bool) else content, path, location)


def _read_entry(
    record: Record, settings: Benchmark, kind: str, identity: str, location: Place, solutions: bool
) -> tuple[Entry, list[Fault]]:
    """Return a record's entry and the faults of the fields that cannot be read."""
    faults: list[Fault] = []

    def attempt(read: Callable[..., Any], *arguments: Any, otherwise: Any) -> Any:
        try:
            return read(record, *arguments, location)
        except RecordError as error:
            faults.append(error.fault)
            return otherwise

    before, question_text = attempt(read_prompt, settings.question, otherwise=((), UNREAD))
    answers = attempt(read_answers, settings, otherwise=())
    scorer = attempt(read_scorer, settings.scorer, otherwise="exact")
    solution = None
    if solutions and settings.solution:
        solution = attempt(text, settings.solution, otherwise=None)
    question = Question(identity, kind, question_text, answers, scorer, before)
    return Entry(question, solution, location), faults


def _problems(entry: Entry, record: Record, settings: Benchmark, problems: Problems) -> list[Fault]:
    """Return the problems of a question as faults of the record's fields."""
    question_problems = list(problems(entry.question))
    fields = {"text": settings.question, "answers": settings.answer}
    unread = entry.question.text == UNREAD
    if (
        question_problems
        and not unread
        and isinstance(value(record, settings.question, entry.place), list)
    ):
        contents = [*(f"before.{n}" for n in range(len(entry.question.before))), "text"]
        fields |= {
            part: f"{settings.question}.{number}.content" for number, part in enumerate(contents)
        }
    alone = f"; or name {fields['text']} as the question, which leaves this message out"
    return [
        Fault(
            entry.place,
            problem,
            remedy + (alone if part.startswith("before") else ""),
            fields[part],
            detail,
        )
        for part, problem, detail, remedy in question_problems
    ]


def read_scorer(record: Record, scorer: str | Mapping[str, str], location: Place) -> str:
    """Return the scorer of a record: the set's, or the one that a field of the record chooses."""
    if isinstance(scorer, str):
        return scorer
    field = scorer[BY_FIELD]
    name = as_text(value(record, field, location), field, location)
    if name == BY_FIELD or name not in scorer:
        known = sorted(set(scorer) - {BY_FIELD})
        problem = "names no scorer of the set's row in params/benchmarks.yaml"
        detail = f" (it is {shown(name)}, known are {known})"
        remedy = "add it there, or correct the record"
        raise RecordError(Fault(location, problem, remedy, field, detail))
    return scorer[name]


def read_prompt(record: Record, field: str, location: Place) -> tuple[tuple[Message, ...], str]:
    """Return the messages before the question, and its text; the field is a text or a chat."""
    prompt = value(record, field, location)
    if not isinstance(prompt, list):
        return (), as_text(prompt, field, location)
    if not prompt:
        remedy = "the last message must be the user's"
        raise RecordError(Fault(location, "is an empty chat", remedy, field))
    *before, last = (_message(each, f"{field}.{i}", location) for i, each in enumerate(prompt))
    if last.role != "user":
        problem = f"ends with a message of {last.role}"
        raise RecordError(Fault(location, problem, "the last must be the user's", field))
    return tuple(before), last.content


def _message(message: Any, field: str, location: Place) -> Message:
    if not isinstance(message, dict) or not {"role", "content"} <= set(message):
        problem, remedy = "is no message", "a role and a content are expected"
        raise RecordError(Fault(location, problem, remedy, field, f" but {shown(message)}"))
    role, content = message["role"], message["content"]
    if role not in ROLES:
        problem = f"has the role {shown(role)}"
        raise RecordError(Fault(location, problem, f"known are {', '.join(ROLES)}", field))
    if isinstance(content, list):
        content = "".join(_part(part, field, location) for part in content)
    return Message(role, as_text(content, f"{field}.content", location))


def _part(part: Any, field: str, location: Place) -> str:
    """Return the text of one part of a message's content."""
    text_part = isinstance(part, dict) and part.get("type") == "text"
    if text_part and isinstance(part.get("text"), str):
        return part["text"]
    problem, remedy = "has a part that is no text", "only parts of type 'text' can be read"
    raise RecordError(Fault(location, problem, remedy, field, f" ({shown(part)})"))


def read_answers(record: Record, settings: Benchmark, location: Place) -> tuple[str, ...]:
    """Return the accepted forms of the answer: those of its field, then the aliases.

    A field is a text, a number, a bool, or a list of these. True becomes "yes", False "no".
    """
    forms = _forms(record, settings.answer, location)
    if not forms:
        remedy = "give at least one accepted form"
        raise RecordError(Fault(location, "is an empty list", remedy, settings.answer))
    if settings.answer_after:
        forms = [_after(form, settings.answer_after, settings.answer, location) for form in forms]
    if settings.boxed:
        forms = [_boxed(form, settings.answer, location) for form in forms]
    if settings.aliases:
        forms += _forms(record, settings.aliases, location)
    return tuple(dict.fromkeys(forms))


def _forms(record: Record, field: str, location: Place) -> list[str]:
    content = value(record, field, location)
    return [
        as_text(TRUTH[form] if isinstance(form, bool) else form, field, location)
        for form in (content if isinstance(content, list) else [content])
    ]


def _after(written: str, mark: str, field: str, location: Place) -> str:
    _, separator, answer = written.rpartition(mark)
    if not separator or not answer.strip():
        problem = f"has no answer after the mark {mark!r}"
        remedy = "correct the record, or answer_after in params/benchmarks.yaml"
        detail = f" (it ends with {written[-60:]!r})"
        raise RecordError(Fault(location, problem, remedy, field, detail))
    return answer.strip()


def _boxed(written: str, field: str, location: Place) -> str:
    """Return what the last box of a worked solution holds; MATH has boxes without braces, too."""
    *_, last = (None, *BOX.finditer(written))
    held = None
    if last:
        rest = written[last.end() :]
        bare = UNBRACED.match(rest)
        held = dialogue.boxed(f"\\boxed{rest}") if rest.startswith("{") else bare and bare[0]
    if not held:
        problem, remedy = "has no \\boxed{} with an answer", "correct the record, or drop it"
        detail = f" (it ends with {written[-60:]!r})"
        raise RecordError(Fault(location, problem, remedy, field, detail))
    return held

"""Questions from the sets in params/benchmarks.yaml, and the SFT traces that belong to them.

A reference such as ``gsm8k/train`` names a set and a split. Its file lies in
data/sources/gsm8k/, or is fetched from the Hugging Face hub; a row of params/benchmarks.yaml
defines how its records are read.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import errors, hf_hub_download

from params.schema.base import SOURCES
from params.schema.benchmarks import BY_FIELD, Benchmark, Hub, benchmark_of
from params.schema.prepare import AnyExpert, BenchmarkQuestions, CalculatorExpert, WrittenTraces
from tasks.environments import Respond
from tasks.questions import calculator
from tasks.questions.experts import Dropped, Material, Parts, Trace
from tasks.questions.files import FORMATS, Place, Record, as_text, records, text, value
from tasks.trees.tree import Message, Question
from tasks.trees.words import overlaps, shared_phrase

Sets = Mapping[str, Benchmark]
Right = Callable[[Question, str], bool]  # whether an answer to a question is right
Write = Callable[[Respond], tuple[list[Trace], list[Dropped]]]

LONGEST_PHRASE = 200  # characters of a shared phrase in the table of dropped questions
ROLES = ("system", "user", "assistant")
TRUTH = {True: "yes", False: "no"}
UNREACHABLE = (OSError, errors.EntryNotFoundError, errors.HTTPError, errors.HFValidationError)
_RESULT = re.compile(r"(<result>.*?</result>)", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """A record of a set: its question, its worked solution (or None), and its place in the file."""

    question: Question
    solution: str | None
    place: Place = ""


# ---------------------------------------------------------------- files


def locate(reference: str, sets: Sets, folder: Path = SOURCES) -> Path:
    """Return the file of a set's split: the one in ``folder``/<set>/, else fetch it from the hub.

    Raises ValueError where two files match, or none and the hub cannot be used.
    """
    name, split = reference.split("/")
    places = [folder / name / f"{split}{suffix}" for suffix in FORMATS]
    found = [place for place in places if place.is_file()]
    if len(found) > 1:
        raise ValueError(
            f"{reference} is in {' and in '.join(map(str, found))}: keep one of the files"
        )
    return found[0] if found else _fetch(reference, benchmark_of(reference, sets).hub, places)


def _fetch(reference: str, hub: Hub | None, places: Sequence[Path]) -> Path:
    split = reference.partition("/")[2]
    others = ", ".join(place.suffix for place in places[1:])
    remedy = f"put its file there as {places[0]} (or {others})"
    if hub is None:
        raise ValueError(
            f"{reference} has no file, and its row in params/benchmarks.yaml no hub: {remedy}"
        )
    if split not in hub.files:
        raise ValueError(
            f"{reference} has no file, and hub.files of its row in params/benchmarks.yaml no "
            f"split '{split}' but {sorted(hub.files)}: name one of these, or {remedy}"
        )
    try:
        return Path(
            hf_hub_download(hub.name, hub.files[split], repo_type="dataset", revision=hub.revision)
        )
    except UNREACHABLE as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{reference} has no file, and {hub.files[split]} of {hub.name} at {hub.revision} "
            f"could not be fetched from the Hugging Face hub ({type(error).__name__}: {reason}): "
            f"{remedy}, or try again with a connection"
        ) from None


# ---------------------------------------------------------------- records


def load(
    reference: str, sets: Sets, folder: Path = SOURCES, *, solutions: bool = True
) -> list[Entry]:
    """Read the records of a set's split as questions, in their order.

    A question's id is set, split and number of the record, from 1; its kind is the set.
    ``solutions``: whether to read the worked solutions too. Raises ValueError with file, place,
    field, value and remedy for a record that cannot be read, and where ``locate`` does.
    """
    settings = benchmark_of(reference, sets)
    name, split = reference.split("/")
    place = locate(reference, sets, folder)
    return read_entries(place, settings, name, f"{name}-{split}", solutions=solutions)


def read_entries(
    file: Path, settings: Benchmark, kind: str, prefix: str, *, solutions: bool = False
) -> list[Entry]:
    """Read the records of a file as questions of a kind, with ids of a prefix and a number from 1.

    Raises ValueError with file, place, field, value and remedy for a record that cannot be read.
    """
    entries = []
    for number, (place, record) in enumerate(records(file, settings.records), start=1):
        before, asked = read_prompt(record, settings.question, place)
        question = Question(
            id=f"{prefix}-{number:05d}",
            kind=kind,
            text=asked,
            answers=read_answers(record, settings.answer, settings.answer_after, place),
            scorer=read_scorer(record, settings.scorer, place),
            before=before,
        )
        solution = None
        if solutions and settings.solution:
            solution = text(record, settings.solution, place)
        entries.append(Entry(question, solution, place))
    return entries


def read_scorer(record: Record, scorer: str | Mapping[str, str], place: str) -> str:
    """Return the scorer of a record: the set's, or the one that a field of the record chooses."""
    if isinstance(scorer, str):
        return scorer
    field, name = scorer[BY_FIELD], as_text(value(record, scorer[BY_FIELD], place), place)
    if name == BY_FIELD or name not in scorer:
        known = sorted(set(scorer) - {BY_FIELD})
        raise ValueError(
            f"{place}: the field '{field}' is {name!r}, and the scorer of the set in "
            f"params/benchmarks.yaml knows {known}: add it there, or correct the record"
        )
    return scorer[name]


def read_prompt(record: Record, field: str, place: str) -> tuple[tuple[Message, ...], str]:
    """Return the messages before the question, and its text; the field is a text or a chat."""
    found = value(record, field, place)
    name = f"{place}: the field '{field}'"
    if not isinstance(found, list):
        return (), as_text(found, name)
    chat = [
        _message(each, f"{name}, message {number}") for number, each in enumerate(found, start=1)
    ]
    if not chat or chat[-1].role != "user":
        last = f"ends with a message of {chat[-1].role}" if chat else "is an empty chat"
        raise ValueError(f"{name} {last}: the last message must be the user's, with the question")
    return tuple(chat[:-1]), chat[-1].content


def _message(found: Any, name: str) -> Message:
    if not isinstance(found, dict) or not {"role", "content"} <= set(found):
        raise ValueError(f"{name} is {str(found)[:60]!r}: a role and a content are expected")
    if found["role"] not in ROLES:
        raise ValueError(f"{name} has the role {found['role']!r}: known are {', '.join(ROLES)}")
    content = found["content"]
    if isinstance(content, list):
        content = "".join(_part(part, name) for part in content)
    return Message(found["role"], as_text(content, f"{name}: its content"))


def _part(found: Any, name: str) -> str:
    if not isinstance(found, dict) or found.get("type") != "text" or not found.get("text"):
        raise ValueError(
            f"{name} has the part {str(found)[:60]!r}: only parts of type 'text' can be read"
        )
    return str(found["text"])


def read_answers(record: Record, field: str, after: str | None, place: str) -> tuple[str, ...]:
    """Return the accepted forms of the answer; the field is a text, number, bool, or list of these.

    True becomes "yes", False "no". ``after``: a mark; the answer is the text after its last place.
    """
    found = value(record, field, place)
    name = f"{place}: the field '{field}'"
    forms = found if isinstance(found, list) else [found]
    if not forms:
        raise ValueError(f"{name} is an empty list: give at least one accepted form")
    written = [as_text(TRUTH[form] if isinstance(form, bool) else form, name) for form in forms]
    if after:
        written = [_after(form, after, name) for form in written]
    return tuple(dict.fromkeys(written))


def _after(written: str, mark: str, name: str) -> str:
    _, found, answer = written.rpartition(mark)
    if not found or not answer.strip():
        raise ValueError(
            f"{name} has no answer after the mark {mark!r}, it ends with {written[-60:]!r}: "
            "correct the record, or answer_after in params/benchmarks.yaml"
        )
    return answer.strip()


# ---------------------------------------------------------------- splits


def material(
    settings: BenchmarkQuestions,
    sets: Sets,
    expert: AnyExpert,
    overlap_words: int,
    right: Right,
    seed: int = 0,
    folder: Path = SOURCES,
) -> Material:
    """Load the questions of the recipe's sets by split, and what writes their traces.

    ``settings.validation`` training questions are set aside as validation questions, drawn by the
    seed from every set in proportion to its size.
    Dropped, each with its reason: "duplicate", a question whose text came before, case and space
    aside (``detail``: whose); "conflicting_answers", such a one with other answers;
    "overlaps_held_out", one for training or validation that shares
    ``overlap_words`` words in a row with a test question, or one for training with one for
    validation (``detail``: which). ``right`` returns whether an answer to a question is right.
    Raises ValueError where ``load`` does, and where no training question is left.
    """
    _check_named_once((*settings.train, *settings.test))
    solutions = expert.kind == "calculator"
    every = _load_each(settings.train, sets, folder, solutions)
    pool, duplicates = distinct(every)
    test, repeated = distinct(_load_each(settings.test, sets, folder, False))
    pool, in_test = apart(pool, test, overlap_words)
    drawn = draw_in_proportion([entry.question.kind for entry in pool], settings.validation, seed)
    validation = [pool[index] for index in sorted(drawn)]
    rest = [entry for index, entry in enumerate(pool) if index not in drawn]
    train, in_validation = apart(rest, validation, overlap_words)
    if not train:
        raise ValueError(
            f"prepare.questions leaves none to train on: {', '.join(settings.train)} have "
            f"{len(every)}, of which {len(duplicates)} are duplicates, {len(in_test)} overlap "
            f"test, {len(validation)} go to validation and {len(in_validation)} overlap those: "
            "name more sets, lower validation or raise overlap_words"
        )
    splits = {"train": train, "validation": validation, "test": test}
    dropped = [*repeated, *duplicates, *in_test, *in_validation]
    return Material(
        {split: [entry.question for entry in members] for split, members in splits.items()},
        WRITERS[expert.kind](expert, every, train, dropped, right),
        dropped=dropped,
    )


def _check_named_once(references: Sequence[str]) -> None:
    for reference in references:
        if references.count(reference) > 1:
            raise ValueError(f"prepare.questions names {reference} more than once: name it once")


def _load_each(references: Sequence[str], sets: Sets, folder: Path, solutions: bool) -> list[Entry]:
    return [
        entry
        for reference in references
        for entry in load(reference, sets, folder, solutions=solutions)
    ]


def draw_in_proportion(kinds: Sequence[str], count: int, seed: int) -> set[int]:
    """Draw ``count`` places, or all if there are fewer, from each kind in proportion to its size.

    What is left over after rounding down goes to the kinds with the largest remainders.
    """
    places: dict[str, list[int]] = {}
    for place, kind in enumerate(kinds):
        places.setdefault(kind, []).append(place)
    wanted = {kind: min(count, len(kinds)) * len(own) / len(kinds) for kind, own in places.items()}
    shares = {kind: int(share) for kind, share in wanted.items()}
    left = min(count, len(kinds)) - sum(shares.values())
    for kind in sorted(wanted, key=lambda kind: shares[kind] - wanted[kind])[:left]:
        shares[kind] += 1
    draw = random.Random(f"{seed}/validation")
    return {place for kind, own in places.items() for place in draw.sample(own, shares[kind])}


def distinct(entries: Sequence[Entry]) -> tuple[list[Entry], list[Dropped]]:
    """Split entries into the first of each text and its repetitions; case and space do not count.

    A repetition is a "duplicate", or has "conflicting_answers" where its accepted forms share none
    with those of the first.
    """
    first: dict[str, Question] = {}
    kept, dropped = [], []
    for entry in entries:
        question = entry.question
        known = first.setdefault(" ".join(question.text.casefold().split()), question)
        if known is question:
            kept.append(entry)
        elif set(known.answers) & set(question.answers):
            dropped.append(Dropped(question.id, "duplicate", known.id))
        else:
            detail = f"{known.id}: {known.answers[0]!r} there, {question.answers[0]!r} here"
            dropped.append(Dropped(question.id, "conflicting_answers", detail))
    return kept, dropped


def apart(
    entries: Sequence[Entry], held_out: Sequence[Entry], words: int
) -> tuple[list[Entry], list[Dropped]]:
    """Split entries into those that overlap no held-out question, and the others."""
    texts, others = ([entry.question.text for entry in each] for each in (entries, held_out))
    found = overlaps(texts, others, words)
    kept, dropped = [], []
    for entry, index in zip(entries, found, strict=True):
        if index is None:
            kept.append(entry)
        else:
            phrase = shared_phrase(entry.question.text, others[index], words)
            detail = f"{held_out[index].question.id}: {phrase[:LONGEST_PHRASE]!r}"
            dropped.append(Dropped(entry.question.id, "overlaps_held_out", detail))
    return kept, dropped


# ---------------------------------------------------------------- traces


def _calculator(
    expert: CalculatorExpert,
    every: Sequence[Entry],
    train: Sequence[Entry],
    dropped: Sequence[Dropped],
    right: Right,
) -> Write:
    """Return a writer of traces from the calculator notes of the worked solutions."""
    solved = []
    for question, solution in ((entry.question, entry.solution) for entry in train):
        if solution is None:
            raise ValueError(
                f"expert.kind is calculator, who needs worked solutions, and the set "
                f"{question.kind} has none: name their field as solution of its row in "
                "params/benchmarks.yaml, or set expert.kind to written"
            )
        solved.append((question, solution))
    return lambda tools: calculator.write_traces(solved, tools, right)


def _written(
    expert: WrittenTraces,
    every: Sequence[Entry],
    train: Sequence[Entry],
    dropped: Sequence[Dropped],
    right: Right,
) -> Write:
    """Return a writer of the traces in the user's file; those of other questions are dropped."""
    questions = {_prompt(entry.question): entry.question for entry in reversed(every)}
    kept = {entry.question.id for entry in train}
    reasons = {each.question_id: each.reason for each in dropped}
    traces, without = [], []
    for place, record in records(expert.file):
        before, asked = read_prompt(record, expert.question, place)
        question = questions.get((before, asked))
        if question is None:
            raise ValueError(
                f"{place}: the question {asked[:60]!r} is in no set of prepare.questions.train: "
                "correct it, or drop the trace"
            )
        parts = read_parts(text(record, expert.response, place))
        if question.id in kept:
            traces.append(Trace(question, "none", parts))
        else:
            detail = reasons.get(question.id, "validation")
            without.append(Dropped(question.id, "trace_of_question_left_out", detail))
    if not traces:
        raise ValueError(
            f"{expert.file}: none of its {len(without)} traces is to a training question that is "
            "left once duplicates, overlaps and validation are taken out: add some"
        )
    return lambda tools: (traces, without)


def _prompt(question: Question) -> tuple[tuple[Message, ...], str]:
    return question.before, question.text


def read_parts(response: str) -> Parts:
    """Cut a written response into (turn, True) and (tool result, False)."""
    parts = [part for part in _RESULT.split(response) if part]
    return [(part, not part.startswith("<result>")) for part in parts]


WRITERS: dict[str, Callable[..., Write]] = {"calculator": _calculator, "written": _written}

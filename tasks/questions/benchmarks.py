"""Questions from the sets in params/benchmarks.yaml.

A reference such as ``gsm8k/train`` names a set and a split. Its file lies in
data/sources/gsm8k/, or is fetched from the Hugging Face hub; a row of params/benchmarks.yaml
defines how its records are read.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from huggingface_hub import errors, hf_hub_download
from numpy.typing import NDArray

from params.schema.base import SOURCES
from params.schema.benchmarks import Benchmark, benchmark_of
from params.schema.prepare import BenchmarkQuestions
from tasks.questions.contract import Rules
from tasks.questions.entries import Entry, Loaded, Problems, places_in, question_of, read_entries
from tasks.questions.experts import Dropped, Material
from tasks.questions.faults import unreadable
from tasks.questions.record_files import SUFFIXES
from tasks.questions.stored import chained, mapped, taken, where
from tasks.trees.tree import Question
from tasks.trees.words import (
    DIGEST_BYTES,
    asked,
    overlaps,
    shared_phrase,
    text_digest,
    told_by_many,
)

Sets = Mapping[str, Benchmark]

LONGEST_PHRASE = 200  # characters of a shared phrase in the table of dropped questions
UNREACHABLE = (OSError, errors.EntryNotFoundError, errors.HTTPError, errors.HFValidationError)


# ---------------------------------------------------------------- files


def locate(reference: str, sets: Sets, folder: Path = SOURCES) -> Path:
    """Return the file of a set's split: the one in ``folder``/<set>/, else fetch it from the hub.

    Raises ValueError where two files match, or none and the hub cannot be used.
    """
    name, split = reference.split("/")
    files = _files_of(split, folder / name)
    if len(files) > 1:
        raise ValueError(
            f"{reference} is in {' and in '.join(map(str, files))}: keep one of the files"
        )
    if files:
        return files[0]
    return _fetch(reference, benchmark_of(reference, sets), folder / name / split)


def _files_of(split: str, folder: Path) -> list[Path]:
    """Return the files of a split in any format, their suffix in capitals or not."""
    if not folder.is_dir():
        return []
    names = {f"{split}{suffix}" for suffix in SUFFIXES}
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and split + path.name[len(split) :].lower() in names
        and path.name.startswith(split)
    ]


def _fetch(reference: str, settings: Benchmark, stem: Path) -> Path:
    hub, split = settings.hub, reference.partition("/")[2]
    others = ", ".join(SUFFIXES[1:])
    remedy = f"put its file there as {stem}{SUFFIXES[0]} (or {others})"
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
            f"{remedy}, or try again with a connection{_terms(settings)}"
        ) from None


def _terms(settings: Benchmark) -> str:
    return f". The set's terms: {settings.terms}" if settings.terms else ""


# ---------------------------------------------------------------- records


def load(
    reference: str,
    sets: Sets,
    problems: Problems,
    folder: Path = SOURCES,
    *,
    solutions: bool = True,
) -> Loaded:
    """Read the records of a set's split as questions, in their order, and the faults of the others.

    A question's id is set, split and number of the record, from 1; its kind is the set.
    ``solutions``: whether to read the worked solutions too. Raises ValueError where ``locate`` does
    and for a file that cannot be read.
    """
    settings = benchmark_of(reference, sets)
    name, split = reference.split("/")
    file = locate(reference, sets, folder)
    return read_entries(file, settings, name, f"{name}-{split}", problems, solutions=solutions)


# ---------------------------------------------------------------- splits


def material(
    settings: BenchmarkQuestions,
    sets: Sets,
    overlap_words: int,
    rules: Rules,
    seed: int = 0,
    folder: Path = SOURCES,
    *,
    solutions: bool = False,
) -> Material:
    """Load the questions of the recipe's sets by split.

    ``solutions``: whether to read the worked solutions, which are then known.

    ``settings.validation`` training questions are set aside as validation questions, drawn by the
    seed from every set in proportion to its size.
    Dropped, each with its reason: "duplicate", a question whose text came before, case and space
    aside (``detail``: whose); "conflicting_answers", such a one with other answers;
    "overlaps_held_out", one for training or validation that shares
    ``overlap_words`` words in a row with a test question, or one for training with one for
    validation (``detail``: which). Faulty records are in no split; they are in the material's
    faults, as are files that cannot be read.
    """
    _check_named_once((*settings.train, *settings.test))
    training = _load_each(settings.train, sets, rules.problems, folder, solutions)
    testing = _load_each(settings.test, sets, rules.problems, folder, False)
    pool, duplicates = distinct(training.entries)
    test, repeated = distinct(testing.entries)
    pool, in_test = apart(pool, test, overlap_words)
    drawn = draw_in_proportion(
        [sys.intern(e.question.kind) for e in pool], settings.validation, seed
    )
    set_aside = np.zeros(len(pool), bool)
    set_aside[list(drawn)] = True
    validation, rest = where(pool, set_aside), where(pool, ~set_aside)
    train, in_validation = apart(rest, validation, overlap_words)
    splits = {"train": train, "validation": validation, "test": test}
    dropped = [*repeated, *duplicates, *in_test, *in_validation]
    unsound = [*training.unsound, *testing.unsound]
    return Material(
        {split: mapped(question_of, members) for split, members in splits.items()},
        known=mapped(_solution, train),
        read=mapped(question_of, chained(training.entries, training.unsound)),
        left_out=_left_out(training, validation, dropped),
        dropped=dropped,
        faults=[*training.faults, *testing.faults],
        unsound=[entry.question for entry in unsound],
        places=partial(places_in, chained(training.entries, testing.entries, unsound)),
    )


def _solution(entry: Entry) -> str | None:
    return entry.solution


def _left_out(
    training: Loaded, validation: Sequence[Entry], dropped: Sequence[Dropped]
) -> dict[str, str]:
    """Return the records of the training sets that are not trained on, each with its reason."""
    reasons = {entry.question.id: "validation" for entry in validation}
    reasons |= {entry.question.id: "faulty_record" for entry in training.unsound}
    return reasons | {each.question_id: each.reason for each in dropped}


def _check_named_once(references: Sequence[str]) -> None:
    for reference in references:
        if references.count(reference) > 1:
            raise ValueError(f"prepare.questions names {reference} more than once: name it once")


def _load_each(
    references: Sequence[str], sets: Sets, problems: Problems, folder: Path, solutions: bool
) -> Loaded:
    """Read several sets one after another; a file that cannot be read is among the faults."""
    loaded = Loaded()
    for reference in references:
        try:
            loaded.extend(load(reference, sets, problems, folder, solutions=solutions))
        except ValueError as error:
            loaded.faults.append(unreadable(error))
    return loaded


def draw_in_proportion(kinds: Sequence[str], count: int, seed: int) -> set[int]:
    """Draw ``count`` indices, or all if there are fewer, from each kind in proportion to its size.

    What is left over after rounding down goes to the kinds with the largest remainders.
    """
    by_kind: dict[str, array[int]] = {}
    for index, kind in enumerate(kinds):
        by_kind.setdefault(kind, array("l")).append(index)
    quotas = {
        kind: min(count, len(kinds)) * len(indices) / len(kinds)
        for kind, indices in by_kind.items()
    }
    shares = {kind: int(share) for kind, share in quotas.items()}
    left = min(count, len(kinds)) - sum(shares.values())
    for kind in sorted(quotas, key=lambda kind: shares[kind] - quotas[kind])[:left]:
        shares[kind] += 1
    draw = random.Random(f"{seed}/validation")
    return {
        index for kind, indices in by_kind.items() for index in draw.sample(indices, shares[kind])
    }


def distinct(entries: Sequence[Entry]) -> tuple[Sequence[Entry], list[Dropped]]:
    """Split entries into the first of each text and its repetitions; case and space do not count.

    A repetition is a "duplicate", or has "conflicting_answers" where its accepted forms share none
    with those of the first.
    """
    first_N = _first_of_each_text(mapped(question_of, entries))
    kept_N = first_N == np.arange(len(entries))
    firsts = np.unique(first_N[~kept_N])
    known = dict(zip(firsts.tolist(), taken(entries, firsts), strict=True))
    repetitions = zip(first_N[~kept_N].tolist(), where(entries, ~kept_N), strict=True)
    dropped = [_repetition(known[first].question, entry.question) for first, entry in repetitions]
    return where(entries, kept_N), dropped


def _first_of_each_text(questions: Sequence[Question]) -> NDArray[np.int64]:
    """Return for each question the place of the first one with its text. [N]"""
    texts = (asked(question.before, question.text) for question in questions)
    digests_N = np.fromiter(map(text_digest, texts), f"S{DIGEST_BYTES}", len(questions))
    _, firsts, which_N = np.unique(digests_N, return_index=True, return_inverse=True)
    return firsts[which_N]


def _repetition(known: Question, question: Question) -> Dropped:
    if set(known.answers) & set(question.answers):
        return Dropped(question.id, "duplicate", known.id)
    detail = f"{known.id}: {known.answers[0]!r} there, {question.answers[0]!r} here"
    return Dropped(question.id, "conflicting_answers", detail)


def apart(
    entries: Sequence[Entry], held_out: Sequence[Entry], words: int
) -> tuple[Sequence[Entry], list[Dropped]]:
    """Split entries into those that overlap no held-out question, and the others.

    What was said before a question's text is a part of it.
    """
    shared = told_by_many(entry.question.before for entry in held_out)

    def text_of(entry: Entry) -> str:
        return asked(entry.question.before, entry.question.text, shared)

    indices = overlaps(map(text_of, entries), [*map(text_of, held_out)], words)
    flags_N = np.fromiter((index is None for index in indices), bool, len(entries))
    dropped = []
    others = (index for index in indices if index is not None)
    for entry, index in zip(where(entries, ~flags_N), others, strict=True):
        other = held_out[index].question
        phrase = shared_phrase(text_of(entry), text_of(held_out[index]), words)
        detail = f"{other.id}: {phrase[:LONGEST_PHRASE]!r}"
        dropped.append(Dropped(entry.question.id, "overlaps_held_out", detail))
    return where(entries, flags_N), dropped

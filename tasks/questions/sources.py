"""The sources of questions by name, and the files that they are read from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from params.schema import benchmarks as benchmarks_module
from params.schema import prepare as schema
from params.schema.base import SOURCES, Frozen
from params.schema.benchmarks import Benchmark
from params.schema.prepare import Prepare
from tasks.ledger.artifacts import Artifact
from tasks.questions import benchmarks, choice, computation, encyclopedia, intake, worlds
from tasks.questions.contract import Lesson, Rules
from tasks.questions.experts import Material
from tasks.questions.faults import Fault, Place, RecordError, unreadable
from tasks.questions.fields import Record, text
from tasks.questions.record_files import check_folder, check_regular, rows
from tasks.questions.stored import Stored, chained
from tasks.tools.search import Search
from tasks.trees.tree import Document

Sets = Mapping[str, Benchmark]
World = Mapping[str, Frozen]  # the settings of a recipe's world by its name; {}: there is none
NO_WORLD: World = MappingProxyType({})

# ---------------------------------------------------------------- files


def source_files(settings: Prepare, tools: Mapping[str, Frozen], sets: Sets) -> list[Artifact]:
    """Return the files that questions, traces and corpus are read from.

    The user's own files are looked up before files of the hub are fetched. Raises ValueError for a
    missing one, and for what ``check_folder`` refuses in the folder of these files.
    """
    check_folder(SOURCES)
    expert = settings.expert
    user_files = choice.find(expert.kind).files(expert) if expert else []
    if file := own_corpus(tools):
        user_files.append(("tools.search.corpus", file))
    for key, file in user_files:
        if not file.exists():
            raise ValueError(
                f"{key}: {file} does not exist: correct its path in the recipe, or put the file "
                "there (data/sources/README.md has its form)"
            )
        check_regular(file)
    files = [file for _, file in user_files]
    if isinstance(settings.questions, schema.BenchmarkQuestions):
        references = (*settings.questions.train, *settings.questions.test)
        files = [*(benchmarks.locate(reference, sets) for reference in references), *files]
    folders = [settings.intake.folder] if settings.intake else []
    delivered = [folder for folder in folders if intake.files(folder)]
    return [Artifact.at(path) for path in (*files, *delivered)]


def own_corpus(tools: Mapping[str, Frozen]) -> Path | None:
    """Return the user's file of documents that the search tool reads, or None."""
    search = tools.get("search")
    return search.corpus if isinstance(search, Search) else None


def read_corpus(tools: Mapping[str, Frozen]) -> tuple[list[Document], list[Fault]]:
    """Return the documents of the user's own corpus, records with a title and a text, and faults.

    A file that cannot be read is among the faults.
    """
    documents: list[Document] = []
    faults: list[Fault] = []
    file = own_corpus(tools)
    try:
        for location, record in rows(file, fields=("title", "text")) if file else ():
            reading = record if isinstance(record, Fault) else _document(record, location)
            (faults if isinstance(reading, Fault) else documents).append(reading)  # type: ignore[arg-type]
    except ValueError as error:
        faults.append(unreadable(error))
    return documents, faults


def _document(record: Record, location: Place) -> Document | Fault:
    try:
        return Document(text(record, "title", location), text(record, "text", location))
    except RecordError as error:
        return error.fault


# ---------------------------------------------------------------- questions


def material(
    settings: Prepare, sets: Sets, rules: Rules, seed: int, environment: World = NO_WORLD
) -> Material:
    """Return the questions of the recipe's source, and what writes their traces."""
    expert = settings.expert
    solutions = choice.find(expert.kind).solutions if expert else False
    material = MATERIALS[settings.questions.source](
        settings, sets, rules, seed, environment, solutions
    )
    return taught(material, expert, rules, seed) if expert else material


def taught(material: Material, expert: schema.Expert, rules: Rules, seed: int) -> Material:
    """Return the material with what writes the expert's traces, and the faults of its files."""
    lesson = Lesson(
        material.questions["train"], material.known, seed, rules, material.read, material.left_out
    )
    write, faults = choice.find(expert.kind).open(expert, lesson)
    return replace(material, write_traces=write, faults=[*material.faults, *faults])


def _computation(settings: Prepare, sets: Sets, rules: Rules, seed: int, *_: Any) -> Material:
    assert isinstance(settings.questions, schema.ComputationQuestions)
    return computation.material(settings.questions, seed)


def _encyclopedia(settings: Prepare, sets: Sets, rules: Rules, seed: int, *_: Any) -> Material:
    assert isinstance(settings.questions, schema.EncyclopediaQuestions)
    return encyclopedia.material(settings.questions, seed)


def _benchmarks(
    settings: Prepare, sets: Sets, rules: Rules, seed: int, environment: World, solutions: bool
) -> Material:
    assert isinstance(settings.questions, schema.BenchmarkQuestions)
    return benchmarks.material(
        settings.questions, sets, settings.overlap_words, rules, seed, solutions=solutions
    )


def _environment(
    settings: Prepare, sets: Sets, rules: Rules, seed: int, environment: World, *_: Any
) -> Material:
    assert isinstance(settings.questions, schema.EnvironmentQuestions)
    return worlds.material(settings.questions, environment, seed)


MATERIALS: dict[str, Callable[[Prepare, Sets, Rules, int, World, bool], Material]] = {
    "computation": _computation,
    "encyclopedia": _encyclopedia,
    "benchmarks": _benchmarks,
    "environment": _environment,
}


def take_in(
    settings: Prepare, sets: Sets, material: Material, rules: Rules, too_long: intake.TooLong
) -> tuple[Material, intake.Delivery]:
    """Return the material with the new training questions of the intake folder, and its delivery.

    A file that is refused is printed with its faults and skipped. ``too_long`` returns the faults
    of questions that are too long.
    """
    if settings.intake is None:
        return material, intake.Delivery(Stored(), [], [], [])
    folder, kind = settings.intake.folder, settings.intake.set
    row = benchmarks_module.benchmark_of(kind, sets)
    drop = settings.faulty == "drop"
    delivery = intake.read(folder, kind, row, rules.problems, too_long, drop=drop)
    for refused in delivery.refused:
        print(f"prepare: the file {folder / refused.question_id} is set aside: {refused.detail}")
    train, *others = (material.questions[split] for split in ("train", "validation", "test"))
    held_out = chained(*others)
    taken, left_out = intake.new_questions(delivery, train, held_out, settings.overlap_words)
    if delivery.entries:
        print(f"prepare: {len(taken)} new questions from {folder}")
    questions = {**material.questions, "train": chained(train, taken)}
    return replace(material, questions=questions, dropped=[*material.dropped, *left_out]), delivery

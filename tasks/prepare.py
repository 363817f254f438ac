"""prepare: questions, a corpus, SFT traces and the first policy, checked before any training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from prefect import task

from params.schema import benchmarks as benchmarks_module
from params.schema import prepare as schema
from params.schema.agent import Dialogue
from params.schema.base import Frozen, Machine
from params.schema.benchmarks import Benchmark
from params.schema.prepare import Prepare, PretrainedPolicy, TinyPolicy
from tasks.environments import Respond
from tasks.gates import gate
from tasks.gates import questions as question_gate
from tasks.gates import traces as trace_gate
from tasks.ledger import prefect_cache, substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import Step
from tasks.policy import machine as policies
from tasks.policy import model as model_module
from tasks.policy import tiny
from tasks.questions import benchmarks, computation, encyclopedia, intake
from tasks.questions.experts import Dropped, Material, Trace
from tasks.questions.files import records, text
from tasks.scorers import SCORERS
from tasks.tools.search import Search, save_corpus
from tasks.trees import dialogue as talk
from tasks.trees.tables import save_questions, write_table
from tasks.trees.tree import Document, Question

OpenTools = Callable[[Path], AbstractContextManager[Respond]]  # given the folder of the corpus
Sets = Mapping[str, Benchmark]

TRACE_TABLE = pa.schema(
    {
        "question_id": pa.string(),
        "split": pa.string(),
        "kind": pa.string(),
        "flaw": pa.string(),
        "text": pa.string(),
        "tokens": pa.list_(pa.int32()),
        "trained": pa.list_(pa.bool_()),
    }
)
DROPPED_TABLE = pa.schema(
    {"question_id": pa.string(), "reason": pa.string(), "detail": pa.string()}
)


@dataclass(frozen=True)
class PrepareInputs:
    """What decides questions, traces and the first policy."""

    settings: Prepare
    sets: Sets  # rows of params/benchmarks.yaml that the settings name
    sources: list[Artifact]  # the files that they name
    dialogue: Dialogue
    tools: Mapping[str, Frozen]  # their settings, by name
    machine: Machine


@task(**prefect_cache.TASK_OPTIONS)
@substeps.recorded
def prepare(step: Step, inputs: PrepareInputs, *, open_tools: OpenTools) -> Record:
    """Make the questions, the corpus, the SFT traces and the first policy, and check them.

    Artifacts: ``questions`` (a table a split), ``corpus``, ``traces``, ``dropped`` (questions that
    were left out or got no trace, each with its reason), ``initial`` (the policy), ``gates``.

    ``open_tools`` opens the tools, given the folder of the corpus.
    Raises ValueError for a fault in the user's files or a context too small for a prompt and the
    response budget, GateError for a table that breaks a critical expectation.
    """
    settings, dialogue = inputs.settings, inputs.dialogue
    policies.use_machine(inputs.machine)
    material = SOURCES[settings.questions.source](settings, inputs.sets, step.seed)
    taken, left_out = take_in(settings, inputs.sets, material)
    questions = {**material.questions, "train": [*material.questions["train"], *taken]}
    docs = gate.DOCS / step.recipe
    verdict = step.out / "gates" / "questions.json"
    check_questions(questions, settings, len(taken), verdict, docs / "questions")
    for split, entries in questions.items():
        save_questions(entries, step.out / "questions" / f"{split}.parquet")
    documents = [*material.documents, *corpus(inputs.tools)]
    save_corpus(documents, step.out / "corpus")

    traces, dropped = _write_traces(material, left_out, open_tools, step.out)
    model, tokenizer = POLICIES[settings.policy.kind](settings.policy, material, traces, step.seed)
    check_context(tokenizer, dialogue, questions, settings.policy.context)
    model.save_pretrained(step.out / "initial")
    tokenizer.save_pretrained(step.out / "initial")

    table = trace_table(traces, tokenizer, dialogue)
    write_table(table, step.out / "traces.parquet")
    verdict = step.out / "gates" / "traces.json"
    check_traces(table, traces, questions["train"], inputs, verdict, docs / "traces")
    return {"metrics": _metrics(questions, traces, dropped, model)}


def _write_traces(
    material: Material, left_out: Sequence[Dropped], open_tools: OpenTools, folder: Path
) -> tuple[list[Trace], list[Dropped]]:
    """Write traces with tools on the corpus in ``folder``, and the table of dropped questions."""
    with open_tools(folder / "corpus") as tools:
        traces, without = material.write_traces(tools)
    dropped = [*material.dropped, *left_out, *without]
    _print_summary(len(traces), dropped)
    rows = [vars(each) for each in dropped]
    write_table(pa.Table.from_pylist(rows, schema=DROPPED_TABLE), folder / "dropped.parquet")
    return traces, dropped


def _print_summary(traces: int, dropped: Sequence[Dropped]) -> None:
    reasons = Counter(each.reason for each in dropped)
    counts = [f"{count} {reason}" for reason, count in reasons.most_common()]
    left_out = f"; left out: {', '.join(counts)}" if counts else ""
    print(f"prepare: {traces} traces for the cold start{left_out}")


def _metrics(
    questions: Mapping[str, Sequence[Question]],
    traces: Sequence[Trace],
    dropped: Sequence[Dropped],
    model: Any,
) -> dict[str, float]:
    reasons = Counter(each.reason for each in dropped)
    flawed = sum(trace.flaw != "none" for trace in traces)
    return {
        **{f"{split}_questions": len(entries) for split, entries in questions.items()},
        "traces": len(traces),
        "flawed_traces": flawed / max(1, len(traces)),
        "dropped": len(dropped),
        **{f"dropped_{reason}": count for reason, count in sorted(reasons.items())},
        "parameters": sum(weight.numel() for weight in model.parameters()),
    }


# ---------------------------------------------------------------- where questions come from


def source_files(settings: Prepare, tools: Mapping[str, Frozen], sets: Sets) -> list[Artifact]:
    """Return the files that questions, traces and corpus are read from.

    The user's own files are looked up before files of the hub are fetched. Raises ValueError for a
    missing one.
    """
    own = []
    if isinstance(settings.expert, schema.WrittenTraces):
        own.append(("prepare.expert.file", settings.expert.file))
    if file := own_corpus(tools):
        own.append(("tools.search.corpus", file))
    for key, file in own:
        if not file.is_file():
            raise ValueError(
                f"{key}: {file} does not exist: correct its path in the recipe, or put the file "
                "there (data/sources/README.md has its form)"
            )
    files = [file for _, file in own]
    if isinstance(settings.questions, schema.BenchmarkQuestions):
        references = (*settings.questions.train, *settings.questions.test)
        files = [*(benchmarks.locate(reference, sets) for reference in references), *files]
    folders = [settings.intake.folder] if settings.intake else []
    delivered = [folder for folder in folders if intake.files(folder)]
    return [Artifact.at(path) for path in (*files, *delivered)]


def take_in(
    settings: Prepare, sets: Sets, material: Material
) -> tuple[list[Question], list[Dropped]]:
    """Return the new training questions of the intake folder, and those that are left out.

    A faulty file is printed with its fault and skipped.
    """
    if settings.intake is None:
        return [], []
    folder, kind = settings.intake.folder, settings.intake.set
    delivery = intake.read(folder, kind, benchmarks_module.benchmark_of(kind, sets), intake_fault)
    for refused in delivery.refused:
        print(f"prepare: the file {folder / refused.question_id} is set aside: {refused.detail}")
    train, *others = (material.questions[split] for split in ("train", "validation", "test"))
    held_out = [question for members in others for question in members]
    taken, left_out = intake.new_questions(delivery, train, held_out, settings.overlap_words)
    if delivery.entries:
        print(f"prepare: {len(taken)} new questions from {folder}")
    return taken, left_out


def intake_fault(question: Question) -> str:
    """Return the fault that the gate of questions would find in one question, or ""."""
    faults = {
        "its text": question_gate.text_fault(question.text),
        "the messages before it": question_gate.before_fault(question.before),
        "its answers": question_gate.answers_fault(question.answers),
    }
    if not any(faults.values()):
        score = question_gate.score_fault(question.scorer, question.answers, SCORERS)
        faults["its answers"] = score
    return next((f"{name}: {fault}" for name, fault in faults.items() if fault), "")


def own_corpus(tools: Mapping[str, Frozen]) -> Path | None:
    """Return the user's file of documents that the search tool reads, or None."""
    search = tools.get("search")
    return search.corpus if isinstance(search, Search) else None


def corpus(tools: Mapping[str, Frozen]) -> list[Document]:
    """Return the documents of the user's own corpus: records with a title and a text."""
    file = own_corpus(tools)
    if file is None:
        return []
    return [
        Document(*(text(record, field, place) for field in ("title", "text")))
        for place, record in records(file)
    ]


def _computation(settings: Prepare, sets: Sets, seed: int) -> Material:
    assert isinstance(settings.questions, schema.ComputationQuestions)
    assert isinstance(settings.expert, schema.ComputationExpert)
    return computation.material(settings.questions, settings.expert, seed)


def _encyclopedia(settings: Prepare, sets: Sets, seed: int) -> Material:
    assert isinstance(settings.questions, schema.EncyclopediaQuestions)
    assert isinstance(settings.expert, schema.EncyclopediaExpert)
    return encyclopedia.material(settings.questions, settings.expert, seed)


def _benchmarks(settings: Prepare, sets: Sets, seed: int) -> Material:
    assert isinstance(settings.questions, schema.BenchmarkQuestions)
    return benchmarks.material(
        settings.questions, sets, settings.expert, settings.overlap_words, right, seed
    )


def right(question: Question, answer: str) -> bool:
    """Return whether ``answer`` scores 1 with the question's own scorer."""
    return SCORERS[question.scorer](answer, question.answers)["score"] == 1


SOURCES: dict[str, Callable[[Prepare, Sets, int], Material]] = {
    "computation": _computation,
    "encyclopedia": _encyclopedia,
    "benchmarks": _benchmarks,
}

# ---------------------------------------------------------------- where the policy comes from


def _tiny(
    settings: TinyPolicy, material: Material, traces: Sequence[Trace], seed: int
) -> tuple[Any, Any]:
    texts = [question.text for question in material.questions["train"]]
    texts += [f"{document.title}\n{document.text}" for document in material.documents]
    texts += ["".join(text for text, _ in trace.parts) for trace in traces]
    tokenizer = tiny.build_tokenizer(texts, settings)
    return tiny.build_policy(settings, tokenizer, seed), tokenizer


def _pretrained(settings: PretrainedPolicy, *_: Any) -> tuple[Any, Any]:
    return model_module.fetch_policy(settings)


POLICIES: dict[str, Callable[..., tuple[Any, Any]]] = {"tiny": _tiny, "pretrained": _pretrained}

# ---------------------------------------------------------------- tables and checks


def trace_table(traces: Sequence[Trace], tokenizer: Any, dialogue: Dialogue) -> pa.Table:
    """Return a row a trace, with its tokens and a mask of those that the agent wrote. [T]"""
    rows = []
    for trace in traces:
        prompt = talk.prompt_tokens(tokenizer, dialogue, trace.question)
        tokens, own = talk.trace_tokens(tokenizer, prompt, trace.parts, dialogue.result_tokens)
        rows.append(
            {
                "question_id": trace.question.id,
                "split": "train",
                "kind": trace.question.kind,
                "flaw": trace.flaw,
                "text": "".join(text for text, _ in trace.parts),
                "tokens": tokens,
                "trained": own,
            }
        )
    return pa.Table.from_pylist(rows, schema=TRACE_TABLE)


def check_context(
    tokenizer: Any, dialogue: Dialogue, questions: Mapping[str, Sequence[Question]], context: int
) -> None:
    """Raise ValueError where the longest prompt and the response budget exceed the context."""
    every = [question for entries in questions.values() for question in entries]
    lengths = [len(talk.prompt_tokens(tokenizer, dialogue, entry)) for entry in every]
    prompt, longest = max(zip(lengths, every, strict=True), key=lambda pair: pair[0])
    if prompt + dialogue.response_tokens > context:
        raise ValueError(
            f"question {longest.id} has a prompt of {prompt} tokens; with dialogue.response_tokens "
            f"{dialogue.response_tokens} it exceeds prepare.policy.context {context}: raise the "
            f"context to {prompt + dialogue.response_tokens} or lower response_tokens"
        )


def check_questions(
    questions: Mapping[str, list[Question]],
    settings: Prepare,
    taken_in: int,
    verdict: Path,
    docs: Path,
) -> None:
    """Run the gate of the questions; ``taken_in`` of the training questions were delivered."""
    entries = [
        {**vars(question), "answers": list(question.answers), "split": split}
        for split, members in questions.items()
        for question in members
    ]
    # texts that are no UTF-8 are for the gate to name, so they stay what they are
    table = pd.DataFrame(entries, dtype=object)
    prepared = question_gate.prepare(table, SCORERS, settings.overlap_words)
    rows = settings.questions.rows()
    if rows:
        rows["train"] += taken_in
    expectations = question_gate.expectations(rows=rows)
    gate.check("questions", prepared, expectations, verdict, docs)


def check_traces(
    table: pa.Table,
    traces: Sequence[Trace],
    training: Sequence[Question],
    inputs: PrepareInputs,
    verdict: Path,
    docs: Path,
) -> None:
    """Run the gate of the traces; the share of flawed ones must be near the expert's rates."""
    settings = inputs.settings
    frame = table.to_pandas().assign(parts=[trace.parts for trace in traces])
    prepared = trace_gate.prepare(frame, [question.id for question in training], list(inputs.tools))
    flawed = _expected_share(settings.expert.rates(), len(frame))
    expectations = trace_gate.expectations(settings.policy.context, flawed)
    gate.check("traces", prepared, expectations, verdict, docs)


def _expected_share(rates: Mapping[str, float], traces: int) -> tuple[float, float] | None:
    """Return four standard errors around the rate of flawed traces; None where it is unknown."""
    if not rates or not traces:
        return None
    share = sum(rates.values())
    slack = 4 * float(np.sqrt(share * (1 - share) / traces))
    return max(0.0, share - slack), min(1.0, share + slack)

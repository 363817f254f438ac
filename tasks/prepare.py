"""prepare: questions, a corpus, SFT traces and the first policy, checked before any training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from prefect import task

from params.schema.agent import Dialogue
from params.schema.base import Frozen, Machine
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
from tasks.questions import sources, unusable, written
from tasks.questions.benchmarks import Rules
from tasks.questions.entries import Entry, Problem
from tasks.questions.experts import Dropped, Material, Trace
from tasks.questions.faults import Fault
from tasks.questions.sources import Sets
from tasks.scorers import SCORERS
from tasks.tools.search import save_corpus
from tasks.trees import dialogue as talk
from tasks.trees.tables import save_questions, write_table
from tasks.trees.tree import Question

OpenTools = Callable[[Path], AbstractContextManager[Respond]]  # given the folder of the corpus

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
    Raises ValueError for a fault in the user's files, those of the intake folder excepted, or a
    context too small for a prompt and the response budget, GateError for a table that breaks a
    critical expectation.
    """
    settings = inputs.settings
    policies.use_machine(inputs.machine)
    rules = rules_of(inputs)
    own = sources.material(settings, inputs.sets, rules, step.seed)
    documents, of_corpus = sources.read_corpus(inputs.tools)
    docs = gate.DOCS / step.recipe
    faults = [*own.faults, *of_corpus]
    faulty = leave_out_faulty(faults, own, inputs, docs)
    check_questions(own, own, settings, step.out / "gates" / "questions.json", docs)
    save_corpus([*own.documents, *documents], step.out / "corpus")

    with open_tools(step.out / "corpus") as tools:
        traces, without = own.write_traces(tools)
    model, tokenizer = POLICIES[settings.policy.kind](settings.policy, own, traces, step.seed)
    traces, forging = written.without_marks(traces, talk.forged(tokenizer))
    kept, traces, table, long, faults = leave_out_long(own, traces, tokenizer, inputs, docs, faults)
    # its lengths depend on the tokenizer, which does not depend on it
    lengths = partial(_long_entries, tokenizer, inputs)
    material, delivery = sources.take_in(settings, inputs.sets, kept, rules, lengths)
    long += unusable.leave_out([*delivery.faults, *delivery.long], docs, faults)
    if long or delivery.entries:
        check_questions(material, own, settings, step.out / "gates" / "questions.json", docs)
    for split, entries in material.questions.items():
        save_questions(entries, step.out / "questions" / f"{split}.parquet")
    dropped = [*material.dropped, *faulty, *long, *without, *forging]
    rows = [vars(each) for each in dropped]
    write_table(pa.Table.from_pylist(rows, schema=DROPPED_TABLE), step.out / "dropped.parquet")
    model.save_pretrained(step.out / "initial")
    tokenizer.save_pretrained(step.out / "initial")

    write_table(table, step.out / "traces.parquet")
    _print_summary(len(traces), dropped)
    check_traces(table, traces, material, inputs, step.out / "gates" / "traces.json", docs)
    return {"metrics": _metrics(material.questions, traces, dropped, model)}


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


# ---------------------------------------------------------------- records that cannot be used


def rules_of(inputs: PrepareInputs) -> Rules:
    """Return what the records of the user's files have to satisfy."""
    tools, context = list(inputs.tools), inputs.settings.policy.context

    def problems(question: Question) -> Iterable[Problem]:
        return unusable.far_too_long(question, inputs.dialogue, context) or question_gate.problems(
            question, SCORERS
        )

    return Rules(
        problems=problems,
        trace_problem=partial(trace_gate.trace_fault, tools=tools),
        right=right,
        longest_trace=context * unusable.CHARACTERS_A_TOKEN,
    )


def _long_entries(tokenizer: Any, inputs: PrepareInputs, entries: Sequence[Entry]) -> list[Fault]:
    """Return a fault for each of the entries that is too long."""
    questions = {"train": [entry.question for entry in entries]}
    places = {entry.question.id: entry.place for entry in entries}
    material = Material(questions, lambda tools: ([], []), places=places)
    context = inputs.settings.policy.context
    return unusable.long_questions(material, tokenizer, inputs.dialogue, context)


def right(question: Question, answer: str) -> bool:
    """Return whether ``answer`` scores 1 with the question's own scorer."""
    return SCORERS[question.scorer](answer, question.answers)["score"] == 1


def leave_out_faulty(
    faults: Sequence[Fault], material: Material, inputs: PrepareInputs, docs: Path
) -> list[Dropped]:
    """Return the faulty records as dropped.

    Raises ValueError with all of them, and what is too long, where the recipe stops at faulty
    records; and where no training question is left.
    """
    (docs / unusable.LISTING).unlink(missing_ok=True)
    unreadable = any(not fault.place for fault in faults)  # a file, which is never left out
    if unreadable or (faults and inputs.settings.faulty == "stop"):
        unusable.refuse([*faults, *_likely_lengths(material, inputs)], docs)
    dropped = unusable.leave_out(faults, docs)
    if not material.questions["train"]:
        reasons = Counter(each.reason for each in (*dropped, *material.dropped))
        counts = [f"{count} {reason}" for reason, count in reasons.most_common()]
        counts.append(f"{len(material.questions['validation'])} go to validation")
        raise ValueError(
            f"prepare.questions leaves none to train on ({', '.join(counts)}): name more sets, "
            "lower validation, raise overlap_words or correct the records"
        )
    return dropped


def _likely_lengths(material: Material, inputs: PrepareInputs) -> list[Fault]:
    """Return the questions that are too long, as far as a tokenizer can be had already.

    A tiny policy's own is trained later, on the traces too.
    """
    policy, dialogue = inputs.settings.policy, inputs.dialogue
    unsound = [
        question
        for question in material.unsound
        if not unusable.far_too_long(question, dialogue, policy.context)
    ]
    whole = replace(material, unsound=unsound, questions={**material.questions, "unsound": unsound})
    try:
        tokenizer = TOKENIZERS[policy.kind](policy, whole)
        return unusable.long_questions(whole, tokenizer, dialogue, policy.context)
    except (OSError, ValueError) as error:
        print(f"prepare: lengths are not checked yet: {error}", flush=True)
        return []


def leave_out_long(
    material: Material,
    traces: Sequence[Trace],
    tokenizer: Any,
    inputs: PrepareInputs,
    docs: Path,
    earlier: Sequence[Fault],
) -> tuple[Material, list[Trace], pa.Table, list[Dropped], list[Fault]]:
    """Return questions and traces that fit into the context, their table, the others, and faults.

    ``earlier`` faults stay in the list of all faults, which is returned and is in ``docs``.
    Raises ValueError with all that are too long, where the recipe stops at faulty records.
    """
    context = inputs.settings.policy.context
    of_questions = unusable.long_questions(material, tokenizer, inputs.dialogue, context)
    ids = {fault.question_id for fault in of_questions}
    rest = [trace for trace in traces if trace.question.id not in ids]
    table = trace_table(rest, tokenizer, inputs.dialogue)
    lengths = pc.list_value_length(table["tokens"]).to_pylist()
    faults = [*of_questions, *unusable.long_traces(rest, lengths, context)]
    if not faults:
        return material, rest, table, [], [*earlier]
    if inputs.settings.faulty == "stop":
        unusable.refuse(faults, docs)
    dropped = unusable.leave_out(faults, docs, earlier)
    without = [each.question.id for each in traces if each.question.id in ids]
    dropped += [Dropped(each, "trace_of_question_left_out", "too_long") for each in without]
    kept = {
        split: [question for question in members if question.id not in ids]
        for split, members in material.questions.items()
    }
    fits = [length <= context for length in lengths]
    short = [trace for trace, fit in zip(rest, fits, strict=True) if fit]
    left = replace(material, questions=kept)
    return left, short, table.filter(pa.array(fits)), dropped, [*earlier, *faults]


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


def _tiny_tokenizer(settings: TinyPolicy, material: Material) -> Any:
    questions = [*material.questions["train"], *material.unsound]
    return tiny.build_tokenizer([question.text for question in questions], settings)


def _pretrained_tokenizer(settings: PretrainedPolicy, material: Material) -> Any:
    return model_module.fetch_tokenizer(settings)


POLICIES: dict[str, Callable[..., tuple[Any, Any]]] = {"tiny": _tiny, "pretrained": _pretrained}
TOKENIZERS: dict[str, Callable[..., Any]] = {  # before there are traces
    "tiny": _tiny_tokenizer,
    "pretrained": _pretrained_tokenizer,
}

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


def check_questions(
    material: Material, own: Material, settings: Prepare, verdict: Path, docs: Path
) -> None:
    """Run the gate of the questions; ``own`` are the recipe's, without those delivered."""
    entries = [
        {**vars(question), "answers": list(question.answers), "split": split}
        for split, members in material.questions.items()
        for question in members
    ]
    # texts that are no UTF-8 are for the gate to name, so they stay what they are
    table = pd.DataFrame(entries, dtype=object)
    prepared = question_gate.prepare(table, SCORERS, settings.overlap_words)
    rows = settings.questions.rows()
    if rows:
        rows["train"] += len(material.questions["train"]) - len(own.questions["train"])
    expectations = question_gate.expectations(rows=rows)
    gate.check("questions", prepared, expectations, verdict, docs / "questions")


def check_traces(
    table: pa.Table,
    traces: Sequence[Trace],
    material: Material,
    inputs: PrepareInputs,
    verdict: Path,
    docs: Path,
) -> None:
    """Run the gate of the traces; the share of flawed ones must be near the expert's rates."""
    settings = inputs.settings
    frame = table.to_pandas().assign(parts=[trace.parts for trace in traces])
    training = [question.id for question in material.questions["train"]]
    prepared = trace_gate.prepare(frame, training, list(inputs.tools))
    flawed = _expected_share(settings.expert.rates(), len(frame))
    expectations = trace_gate.expectations(settings.policy.context, flawed)
    gate.check("traces", prepared, expectations, verdict, docs / "traces")


def _expected_share(rates: Mapping[str, float], traces: int) -> tuple[float, float] | None:
    """Return four standard errors around the rate of flawed traces; None where it is unknown."""
    if not rates or not traces:
        return None
    share = sum(rates.values())
    slack = 4 * float(np.sqrt(share * (1 - share) / traces))
    return max(0.0, share - slack), min(1.0, share + slack)

"""prepare: questions, SFT traces and the first policy, checked before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from prefect import task

from params.schema import (
    Dialogue,
    Expert,
    FileQuestions,
    GeneratedQuestions,
    Machine,
    Prepare,
    PretrainedPolicy,
    PythonTool,
    TinyPolicy,
)
from tasks import dialogue as talk
from tasks import gate, ledger
from tasks import policy as policies
from tasks.expectations import questions as question_gate
from tasks.expectations import traces as trace_gate
from tasks.ledger import Artifact, Step
from tasks.questions import computation, files
from tasks.toolbox import Respond
from tasks.trajectory import Call, Question, save_questions, write_table

Parts = list[tuple[str, bool]]  # (text, whether the agent wrote it)

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


@dataclass(frozen=True)
class Trace:
    """One written answer to a training question, for the cold start."""

    question: Question
    flaw: str  # how the scripted expert was wrong; "none" elsewhere
    parts: Parts


Source = tuple[dict[str, list[Question]], list[Trace]]


@task(**ledger.TASK_OPTIONS)
@ledger.recorded
def prepare(
    step: Step,
    folder: Path,
    *,
    settings: Prepare,
    sources: list[Artifact],
    dialogue: Dialogue,
    machine: Machine,
    limits: PythonTool,
    tools: Respond,
) -> Mapping[str, Any]:
    """Artifacts ``questions`` (a table a split), ``traces``, ``initial`` (the policy), ``gates``.

    ``sources`` are the user's files that ``settings`` names: what is in them decides the outcome,
    as do the ``limits`` of ``tools``.
    Raises ValueError for a fault in the user's files or a context too small for a prompt and the
    response budget, GateError for a table that breaks a critical expectation.
    """
    policies.use_machine(machine)
    questions, traces = SOURCES[settings.questions.source](settings, tools, step.seed)
    for split, entries in questions.items():
        save_questions(entries, folder / "questions" / f"{split}.parquet")
    docs = gate.DOCS / step.recipe
    verdicts = folder / "gates"
    rows = settings.questions.rows()
    check_questions(questions, rows, verdicts / "questions.json", docs / "questions")

    model, tokenizer = POLICIES[settings.policy.kind](settings.policy, questions, traces, step.seed)
    check_context(tokenizer, dialogue, questions, settings.policy.context)
    model.save_pretrained(folder / "initial")
    tokenizer.save_pretrained(folder / "initial")

    table = trace_table(traces, tokenizer, dialogue)
    write_table(table, folder / "traces.parquet")
    check_traces(
        table.to_pandas(),
        questions["train"],
        settings,
        dialogue,
        verdicts / "traces.json",
        docs / "traces",
    )
    flawed = sum(trace.flaw != "none" for trace in traces)
    return {
        "metrics": {
            **{f"{split}_questions": len(entries) for split, entries in questions.items()},
            "traces": len(traces),
            "flawed_traces": flawed / max(1, len(traces)),
            "parameters": sum(weight.numel() for weight in model.parameters()),
        }
    }


def user_files(settings: Prepare) -> list[Artifact]:
    """The user's question files. Raises ValueError for one that is missing."""
    for file in settings.questions.files():
        if not file.is_file():
            raise ValueError(f"{file} does not exist: correct the path in prepare.questions")
    return [ledger.artifact(file) for file in settings.questions.files()]


# ---------------------------------------------------------------- where questions come from


def _generated(settings: Prepare, tools: Respond, seed: int) -> Source:
    assert isinstance(settings.questions, GeneratedQuestions)
    assert settings.expert
    problems = computation.generate(settings.questions, seed)
    taught = problems["train"][: settings.expert.traces]
    questions = {
        split: [problem.question for problem in entries] for split, entries in problems.items()
    }
    return questions, list(_expert_traces(taught, settings.expert, tools, seed))


def _expert_traces(
    problems: Sequence[computation.Problem], expert: Expert, tools: Respond, seed: int
) -> Iterator[Trace]:
    """The scripted expert at work: its calls run in the real tool, all first calls together."""
    scripts = [computation.script(problem, expert, seed) for problem in problems]
    parts: list[Parts] = [[] for _ in scripts]
    results = [""] * len(scripts)
    for number in range(max(len(script.steps) for script in scripts)):
        calling = [i for i, script in enumerate(scripts) if number < len(script.steps)]
        codes = [scripts[i].steps[number].format(results[i]) for i in calling]
        observations = tools([Call("python", code) for code in codes])
        for i, code, observation in zip(calling, codes, observations, strict=True):
            thought = computation.thought(scripts[i].problem.question.kind, number)
            results[i] = observation.text.strip()
            parts[i] += [
                (f"<think>{thought}</think><python>{code}</python>", True),
                (f"<result>{results[i]}</result>", False),
            ]
    for script, own, result in zip(scripts, parts, results, strict=True):
        question = script.problem.question
        thought = computation.thought(question.kind, len(script.steps))
        answer = computation.conclude(script, result)
        end = f"<think>{thought}</think><answer>\\boxed{{{answer}}}</answer>"
        yield Trace(question, script.flaw, [*own, (end, True)])


def _from_files(settings: Prepare, tools: Respond, seed: int) -> Source:
    assert isinstance(settings.questions, FileQuestions)
    questions = files.load(settings.questions)
    traces = files.load_traces(settings.questions, questions["train"])
    return questions, [Trace(question, "none", parts) for question, parts in traces]


SOURCES: dict[str, Callable[[Prepare, Respond, int], Source]] = {
    "generated": _generated,
    "files": _from_files,
}

# ---------------------------------------------------------------- where the policy comes from


def _tiny(
    settings: TinyPolicy, questions: dict[str, list[Question]], traces: list[Trace], seed: int
) -> tuple[Any, Any]:
    texts = [question.text for question in questions["train"]]
    texts += ["".join(text for text, _ in trace.parts) for trace in traces]
    tokenizer = policies.build_tokenizer(texts, settings)
    return policies.build_policy(settings, tokenizer, seed), tokenizer


def _pretrained(settings: PretrainedPolicy, *_: Any) -> tuple[Any, Any]:
    return policies.fetch_policy(settings)


POLICIES: dict[str, Callable[..., tuple[Any, Any]]] = {"tiny": _tiny, "pretrained": _pretrained}

# ---------------------------------------------------------------- tables and checks


def trace_table(traces: Sequence[Trace], tokenizer: Any, dialogue: Dialogue) -> pa.Table:
    """A row a trace, with its tokens and which of them the agent wrote."""
    rows = []
    for trace in traces:
        prompt = talk.prompt_tokens(tokenizer, dialogue, trace.question.text)
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
    lengths = [len(talk.prompt_tokens(tokenizer, dialogue, entry.text)) for entry in every]
    prompt, longest = max(zip(lengths, every, strict=True), key=lambda pair: pair[0])
    if prompt + dialogue.response_tokens > context:
        raise ValueError(
            f"question {longest.id} has a prompt of {prompt} tokens; with dialogue.response_tokens "
            f"{dialogue.response_tokens} it exceeds prepare.policy.context {context}: raise the "
            f"context to {prompt + dialogue.response_tokens} or lower response_tokens"
        )


def check_questions(
    questions: Mapping[str, list[Question]],
    rows: Mapping[str, int] | None,
    verdict: Path,
    docs: Path,
) -> None:
    """The gate of the questions; ``rows``: how many each split must hold, where that is known."""
    entries = [
        {**vars(question), "answers": list(question.answers), "split": split}
        for split, members in questions.items()
        for question in members
    ]
    table = question_gate.prepare(pd.DataFrame(entries))
    expectations = question_gate.expectations(rows=rows)
    gate.check("questions", table, expectations, verdict, docs)


def check_traces(
    table: pd.DataFrame,
    training: Sequence[Question],
    settings: Prepare,
    dialogue: Dialogue,
    verdict: Path,
    docs: Path,
) -> None:
    """The gate of the traces; the share of flawed ones is expected near the expert's rates."""
    prepared = trace_gate.prepare(table, [question.id for question in training], talk.TOOL_TAGS)
    flawed = None
    if settings.expert:
        share = sum(settings.expert.rates().values())
        slack = 4 * float(np.sqrt(share * (1 - share) / len(table)))  # standard errors
        flawed = (max(0.0, share - slack), min(1.0, share + slack))
    expectations = trace_gate.expectations(settings.policy.context, flawed)
    gate.check("traces", prepared, expectations, verdict, docs)

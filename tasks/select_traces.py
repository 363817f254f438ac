"""select_traces: keep right answers of a sampled policy as SFT traces (rejection sampling)."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from params.schema.agent import Agent
from params.schema.prepare import PretrainedPolicy
from tasks.dialects import open_dialect
from tasks.gates import gate
from tasks.gates import traces as trace_gate
from tasks.ledger import substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.policy import load_model
from tasks.policy.load_model import load_tokenizer, save_model
from tasks.questions import trace_tables
from tasks.questions.sampled import Sampled, Teacher
from tasks.rewards.scoring import score_trees
from tasks.rollouts import rejection
from tasks.rollouts.rejection import Attempt
from tasks.trees.tables import load_questions, load_trees, read_rows, write_table
from tasks.trees.tree import ToolSpec

EXAMPLES = 3  # attempts of a reason that a message shows


@dataclass(frozen=True)
class SelectInputs:
    """What decides which sampled answers become traces."""

    trees: list[Artifact]  # of the rollouts, in order
    expert: Sampled
    agent: Agent
    student: Artifact  # the policy that learns from the traces
    teacher: Artifact  # the policy that was sampled; the student, where there is no other
    questions: Artifact  # of training
    context: int  # most tokens of a trace
    dropped: Artifact  # what was left out before
    gates: Artifact  # that were passed before
    scorers: Mapping[str, str] = field(default_factory=dict)  # digests of their sources, by name


@substeps.recorded
def select_traces(step: SubStep, inputs: SelectInputs, *, specs: Sequence[ToolSpec]) -> Record:
    """Score what was sampled, keep what is right and sound, and check the table.

    Artifacts: ``traces``; ``dropped``, the earlier ones and every attempt that is no trace, with
    its reason; ``gates``, the earlier ones and that of the traces. ``specs``: the agent's tools.

    A trace has the token ids that were sampled, where student and teacher have equal vocabularies;
    else its texts are encoded again by the student's tokenizer (``rewriting_fault`` says where that
    cannot be). Raises ValueError where nothing that was sampled is right.
    """
    trees = [tree for artifact in inputs.trees for tree in load_trees(Path(artifact.path))]
    spoken = load_tokenizer(inputs.teacher.path)
    dialect = open_dialect(inputs.agent.dialect, spoken, inputs.agent.dialogue, specs)
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in score_trees(trees, (), reader=dialect):
        rows.setdefault(row["question"], []).append(row)
    most = inputs.expert.most
    attempts = [
        attempt
        for tree in trees
        for attempt in rejection.select(tree, rows[tree.question.id], most)
    ]
    table, too_long = _table(attempts, inputs, specs, spoken)
    rejected = [*(attempt for attempt in attempts if attempt.reason), *too_long]
    counts = _report(len(trees), attempts, rejected)
    _write_dropped(inputs.dropped, rejected, step.out / "dropped.parquet")
    write_table(table, step.out / "traces.parquet")
    shutil.copytree(inputs.gates.path, step.out / "gates")
    _check(table, inputs, step.out / "gates" / "traces.json", gate.DOCS / step.recipe)
    taught = len(set(table["question_id"].to_pylist()))
    return {
        "metrics": {
            "traces": len(table),
            "attempts": len(attempts),
            "questions_with_traces": taught / max(1, len(trees)),
            **{f"dropped_{reason}": count for reason, count in sorted(counts.items())},
        }
    }


def _table(
    attempts: Sequence[Attempt], inputs: SelectInputs, specs: Sequence[ToolSpec], spoken: Any
) -> tuple[pa.Table, list[Attempt]]:
    """Return the table of traces, and attempts that are right and longer than the context."""
    student = load_tokenizer(inputs.student.path)
    same = has_equal_vocabulary(student, spoken)
    dialogue = inputs.agent.dialogue
    dialect = None if same else open_dialect(inputs.agent.dialect, student, dialogue, specs)
    rows: list[dict[str, Any]] = []
    too_long = []
    for attempt in attempts:
        if attempt.reason:
            continue
        rows_of_attempt = (
            rejection.as_sampled(attempt)
            if dialect is None
            else rejection.rewritten(attempt, dialect, dialogue, spoken.eos_token)
        )
        longest = max(len(row["tokens"]) for row in rows_of_attempt)
        if longest <= inputs.context:
            rows += rows_of_attempt
        else:
            detail = f"{longest} tokens"
            too_long.append(Attempt(attempt.tree, attempt.leaf, rejection.TOO_LONG, detail))
    return pa.Table.from_pylist(rows, schema=trace_tables.TRACES), too_long


def _report(
    questions: int, attempts: Sequence[Attempt], rejected: Sequence[Attempt]
) -> Counter[str]:
    """Print how many attempts are traces, and why the others are not; return the counts.

    Raises ValueError where none is.
    """
    counts = rejection.reasons(rejected)
    words = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
    left_out = f"; left out: {words}" if words else ""
    trace_count = len(attempts) - len(rejected)
    total = f"{len(attempts)} attempts at {questions} questions"
    if not trace_count:
        shown = "; ".join(
            f"{each.tree.question.id}: {each.reason} ({each.detail})"
            for each in rejected[:EXAMPLES]
        )
        raise ValueError(
            f"prepare.expert: none of the {total} is right{left_out}. The first: {shown}. Take a "
            "stronger teacher or easier questions, raise attempts, or set prepare.expert and "
            "cold_start to null"
        )
    print(f"prepare: {trace_count} traces of {total}{left_out}", flush=True)
    return counts


def _write_dropped(earlier: Artifact, rejected: Sequence[Attempt], file: Path) -> None:
    rows = [
        {
            "question_id": attempt.tree.question.id,
            "reason": attempt.reason,
            "detail": f"attempt {attempt.leaf}" + (f": {attempt.detail}" * bool(attempt.detail)),
        }
        for attempt in rejected
    ]
    before = read_rows(Path(earlier.path))
    write_table(pa.Table.from_pylist([*before, *rows], schema=trace_tables.DROPPED), file)


def _check(table: pa.Table, inputs: SelectInputs, verdict: Path, docs: Path) -> None:
    """Run the gate of the traces."""
    frame = table.to_pandas()
    frame["parts"] = [[(text, True)] for text in frame["text"]]
    training = [question.id for question in load_questions(Path(inputs.questions.path))]
    prepared = trace_gate.prepare(frame, training, list(inputs.agent.tools))
    expectations = trace_gate.sampled_expectations(inputs.context)
    gate.check("traces", prepared, expectations, verdict, docs / "traces")


# ---------------------------------------------------------------- teachers


@substeps.recorded
def fetch_teacher(step: SubStep, teacher: Teacher) -> Record:
    """Fetch a teacher from the hub at its pinned revision; artifact ``policy``.

    Raises OSError where it is not there, and ValueError where only code of its own can load it.
    """
    weights, tokenizer = load_model.fetch_policy(
        PretrainedPolicy(kind="pretrained", name=teacher.name, revision=teacher.revision, context=1)
    )
    save_model(weights, step.out / "policy")
    tokenizer.save_pretrained(step.out / "policy")
    return {"metrics": {"parameters": sum(weight.numel() for weight in weights.parameters())}}


def has_equal_vocabulary(first: Any, second: Any) -> bool:
    """Return whether token ids mean the same texts to two tokenizers."""
    return bool(
        first.get_vocab() == second.get_vocab() and first.eos_token_id == second.eos_token_id
    )


def rewriting_fault(student: Artifact, teacher: Artifact, agent: Agent) -> str:
    """Return why a teacher's answers cannot become the student's traces, or ""."""
    (dialect,) = agent.dialect
    if has_equal_vocabulary(load_tokenizer(student.path), load_tokenizer(teacher.path)):
        return ""
    if dialect == "tags" and agent.dialogue.prompt == "growing":
        return ""
    return (
        f"prepare.expert.policy: {teacher.path} has another vocabulary than the recipe's policy, "
        "and its answers can be written again only in the dialect tags with growing prompts: take "
        "a teacher with the same tokenizer"
    )

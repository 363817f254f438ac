"""try_agent: let an agent without training do the tasks of a set, and score what comes of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from params.schema.agent import Agent
from params.schema.chat import ChatEndpoint
from params.schema.evaluate import Evaluate
from tasks.agents import AGENTS
from tasks.agents.contract import SNIPPETS, Limits, Task
from tasks.agents.pages import offered
from tasks.agents.prompts import ACTS
from tasks.agents.running import AgentResult, Models, run
from tasks.chat.contract import NO_TEXT
from tasks.dialects import tags
from tasks.environments.contract import FREE_TEXT, OpenEnvironment
from tasks.ledger import substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.rewards.scoring import WORLD, episode_score
from tasks.scorers import lenient, open_scorers
from tasks.scorers.contract import Scorer, ScorerKind
from tasks.trees.tables import write_table
from tasks.trees.tree import Question, ToolSpec

AT_ONCE = 64  # tasks that are done side by side; what they gave is kept before the next ones
PASSING = ("timeout", "malformed", NO_TEXT, "connection lost")  # faults, beside a server's statuses

RESULTS = pa.schema(
    {
        "question": pa.string(),
        "set": pa.string(),
        "scorer": pa.string(),
        "answer": pa.string(),  # null where there is none
        "score": pa.float64(),
        "success": pa.bool_(),  # the highest score
        "lenient": pa.bool_(),  # the answer stands in the last reply, whatever its form, or null
        "last_number": pa.bool_(),  # it is the last number there
        "outcome": pa.string(),  # how the agent has ended
        "fault": pa.string(),  # of the model, which ended the agent; "" for none
        "trials": pa.int32(),
        "tool_calls": pa.int32(),  # these and the following: all trials together
        "tool_errors": pa.int32(),
        "model_calls": pa.int32(),
        "prompt_tokens": pa.int64(),  # read by models: the policy, and the one that condenses
        "completion_tokens": pa.int64(),  # written by them
    }
)

Row = dict[str, Any]
Described = Artifact | ChatEndpoint  # a policy's folder, or a server's model


@dataclass(frozen=True)
class TryInputs:
    """What decides the results of one agent on one set."""

    agent: str  # of tasks.agents.AGENTS
    model: Described
    condenser: Described
    questions: str  # digest of the tasks in their order (tasks/trees/panels.py)
    prompts: Mapping[str, str]
    pages: str
    page_characters: int  # of a page, or of the pages that a search has found, at most
    trials: int
    oracle: bool  # whether the gold answer decides on another trial
    failed_as_wrong: bool  # whether tasks whose model gave no answer are counted, as wrong
    acting: Agent  # limits, tools and world of the recipe
    evaluate: Evaluate  # temperature and top-p
    corpus: Artifact | None
    scorers: Mapping[str, str]  # digests of their sources


@substeps.recorded
def try_agent(
    step: SubStep,
    inputs: TryInputs,
    *,
    questions: Sequence[Question],
    models: Models,
    environment: OpenEnvironment,
    advance: Callable[[int], object] = lambda finished: None,
) -> Record:
    """Run the agent on each task; artifact ``results``, a row a task (RESULTS).

    Each batch of tasks is kept when all of it is done, so a call that was interrupted asks no model
    twice for the tasks before. ``advance`` is called with the number of tasks finished since its
    last call. Raises RuntimeError where no request can succeed, and at the end where some have
    failed that may succeed later, unless ``failed_as_wrong``.
    """
    scratch = step.ledger.scratch(step)
    rows: list[Row] = []
    with open_scorers({each.scorer for each in questions}) as scorers:
        for start in range(0, len(questions), AT_ONCE):
            batch, file = questions[start : start + AT_ONCE], scratch / f"{start:06d}.json"
            if file.is_file():
                rows += json.loads(file.read_text(encoding="utf-8"))
                advance(len(batch))
                continue
            tasks = [_task(each, inputs, scorers, environment) for each in batch]
            with environment.session() as session:
                endings = run(AGENTS[inputs.agent], tasks, models, session, step.seed, advance)
            batch_rows = [_row(*each, inputs, scorers) for each in zip(batch, endings, strict=True)]
            if inputs.failed_as_wrong or not _unanswered(batch_rows):
                _write(file, batch_rows)
            rows += batch_rows
    if not inputs.failed_as_wrong:
        _check_answered(rows)
    write_table(pa.Table.from_pylist(rows, schema=RESULTS), step.out / "results.parquet")
    return {"success": sum(row["success"] for row in rows) / len(rows)}


def _unanswered(rows: Sequence[Row]) -> list[str]:
    """Return the faults after which another attempt may succeed."""
    return [fault for row in rows if (fault := row["fault"]) in PASSING or fault.isdecimal()]


def _check_answered(rows: Sequence[Row]) -> None:
    """Raise RuntimeError where a model has not answered and might, if it is asked again."""
    if faults := Counter(_unanswered(rows)):
        named = ", ".join(f"{fault} ({count})" for fault, count in faults.most_common())
        raise RuntimeError(
            f"{faults.total()} of {len(rows)} tasks have no answer of the model: {named}. Make the "
            "same call again: what was answered is kept. With --failed-as-wrong they count as wrong"
        )


def _task(
    question: Question,
    inputs: TryInputs,
    scorers: Mapping[str, ScorerKind],
    environment: OpenEnvironment,
) -> Task:
    """Return a task for the agent."""
    limits = Limits.of(inputs.acting.dialogue)
    if inputs.pages != SNIPPETS:
        most = max(limits.result_characters, inputs.page_characters)
        limits = replace(limits, result_characters=most)
    compare = scorers[question.scorer].compare
    specs = [_described(spec, inputs) for spec in offered(environment.specs, inputs.pages)]
    return Task(
        question=question,
        specs=specs,
        system=inputs.acting.dialogue.system.replace(tags.TOOLS, tags.describe(specs)),
        prompts=inputs.prompts,
        limits=limits,
        temperature=inputs.evaluate.temperature,
        top_p=inputs.evaluate.top_p,
        pages=inputs.pages,
        trials=inputs.trials,
        oracle=partial(_is_right, question, compare) if inputs.oracle else None,
    )


def _described(spec: ToolSpec, inputs: TryInputs) -> ToolSpec:
    """Return a tool as the prompts describe it: free acts of a world by a file of their own."""
    acts = inputs.prompts.get(ACTS) if spec.name == FREE_TEXT.name else None
    return replace(spec, description=acts) if acts else spec


def _is_right(question: Question, compare: Scorer, answer: str | None) -> bool:
    return answer is not None and compare(answer, question.answers)["score"] >= 1


def _row(
    question: Question,
    ending: AgentResult,
    inputs: TryInputs,
    scorers: Mapping[str, ScorerKind],
) -> Row:
    """Return the scored result of one task. Raises ValueError with the task for a score of none."""
    of_world = ending.in_world
    try:
        if of_world:
            score = episode_score(ending.seen)
        elif ending.answer is None:
            score = 0.0
        else:
            compare = scorers[question.scorer].compare
            score = float(compare(ending.answer, question.answers)["score"])
    except ValueError as error:
        raise ValueError(f"question {question.id}: {error}") from None
    counts = ("trials", "tool_calls", "tool_errors", "model_calls")
    tokens = ("prompt_tokens", "completion_tokens")
    return {
        "question": question.id,
        "set": question.kind,
        "scorer": WORLD if of_world else question.scorer,
        "answer": ending.answer,
        "score": score,
        "success": score >= 1,
        **_lenient(question, ending, score >= 1, inputs, scorers),
        "outcome": str(ending.outcome),
        "fault": ending.fault,
        **{name: getattr(ending, name) for name in (*counts, *tokens)},
    }


def _lenient(
    question: Question,
    ending: AgentResult,
    right: bool,
    inputs: TryInputs,
    scorers: Mapping[str, ScorerKind],
) -> dict[str, bool | None]:
    """Return the lenient scores of the last reply.

    None in a world, and for agents that try again, whose last reply may be about an earlier one.
    """
    answers = not ending.in_world and not AGENTS[inputs.agent].retries
    if not answers or not scorers[question.scorer].lenient:
        return dict.fromkeys(lenient.COLUMNS)
    return lenient.scores(ending.said, question.answers, right)


def _write(file: Path, rows: Sequence[Row]) -> None:
    """Write the rows of a batch, whole or not at all."""
    partial_file = file.with_name(f".{file.name}.partial")
    partial_file.write_text(json.dumps(rows), encoding="utf-8")
    partial_file.rename(file)

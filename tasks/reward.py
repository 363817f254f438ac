"""reward: score the leaves of the trees, as ARPO does (arXiv 2507.19849)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
from prefect import task

from params.schema.algorithms import Overlong
from params.schema.reinforce import Reward
from tasks.ledger import prefect_cache, substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import Step
from tasks.scorers import Scorer, scorers_of_a_question
from tasks.scorers.format import format_faults
from tasks.scorers.maths import OVER_BUDGET, WORKERS
from tasks.scorers.maths_worker import TIMEOUT
from tasks.trees import dialogue as talk
from tasks.trees.outcomes import Outcome
from tasks.trees.tables import load_trees, write_table
from tasks.trees.tree import RESULT, Node, Question, Tree, sampled

TABLE = pa.schema(
    {
        "question": pa.string(),
        "kind": pa.string(),
        "leaf": pa.int32(),
        "scorer": pa.string(),  # the kind that compared the answer
        "reward": pa.float64(),
        "length_penalty": pa.float64(),  # beside the reward: 0 or below
        "score": pa.float64(),  # of the answer, whatever the format; 0 where there is none
        "breakdown": pa.map_(pa.string(), pa.float64()),  # what the score was made from
        "success": pa.bool_(),  # the highest score in a sound format
        "answer": pa.string(),  # null where none could be extracted
        "faults": pa.list_(pa.string()),  # what is wrong with the format
        "outcome": pa.string(),  # how the last turn ended
        "tool_calls": pa.int32(),
        "tool_errors": pa.int32(),
        "response_tokens": pa.int32(),  # sampled and observed
        "sampled_tokens": pa.int32(),
    }
)


MOST_TIMEOUTS = 4  # different answers of a question with which the verifier may run out of time


@dataclass(frozen=True)
class RewardInputs:
    """What decides rewards."""

    trees: Artifact
    settings: Reward
    overlong: Overlong | None  # the penalty on responses near the budget; None: length is free
    response_tokens: int  # the budget of a response


@task(**prefect_cache.TASK_OPTIONS)
@substeps.recorded
def reward(step: Step, inputs: RewardInputs) -> Record:
    """Score every leaf; artifact ``rewards``, a row a leaf with the reward's breakdown."""
    began = time.perf_counter()
    trees = load_trees(Path(inputs.trees.path))
    rows = score_trees(trees, inputs.settings)
    for row in rows:
        row["length_penalty"] = length_penalty(
            row["response_tokens"], inputs.response_tokens, inputs.overlong
        )
    write_table(pa.Table.from_pylist(rows, schema=TABLE), step.out / "rewards.parquet")
    return {
        "metrics": {
            "reward": sum(row["reward"] for row in rows) / len(rows),
            "success": sum(row["success"] for row in rows) / len(rows),
            "broken_format": sum(bool(row["faults"]) for row in rows) / len(rows),
            "groups_without_spread": 1
            - _groups_that_differ(rows, _shaped) / len({r["question"] for r in rows}),
        },
        "seconds": {"reward": time.perf_counter() - began},
        "groups_with_spread": _groups_that_differ(rows, lambda row: row["score"]),
    }


def score_trees(
    trees: Sequence[Tree], settings: Reward, most_timeouts: int = MOST_TIMEOUTS
) -> list[dict[str, Any]]:
    """Return a row of ``TABLE`` for each leaf of each tree, without the length penalty.

    Trees are scored side by side, and no tree changes the scores of another. Equal answers of a
    tree are compared once. After ``most_timeouts`` different answers of a tree, in the order of its
    leaves, with which the mathematics verifier ran out of processor time, further ones that only it
    could compare score 0, as "over_budget". A tree of one leaf, as in an evaluation, has no budget.
    Which answers run out of time depends on the speed of the processor.

    Raises ValueError for a question whose scorer is unknown.
    """
    with ThreadPoolExecutor(WORKERS) as pool:
        of_trees = pool.map(partial(_tree_rows, settings=settings, most=most_timeouts), trees)
        rows = list(chain.from_iterable(of_trees))
    slow = {(row["question"], row["answer"]) for row in rows if TIMEOUT in row["breakdown"]}
    if slow:
        skipped = sum(OVER_BUDGET in row["breakdown"] for row in rows)
        print(
            f"reward: different answers on which the mathematics verifier ran out of processor "
            f"time: {len(slow)}; rollouts that were not compared, as {most_timeouts} such answers "
            f"to their question came before: {skipped}; all of these score 0",
            flush=True,
        )
    return rows


def _tree_rows(tree: Tree, settings: Reward, most: int) -> list[dict[str, Any]]:
    question, trajectories = tree.question, list(tree.trajectories())
    scorer = _scorer(question, scorers_of_a_question(most))
    answers = [talk.final_answer(_own_words(trajectory)) for trajectory in trajectories]
    breakdowns = {
        answer: {} if answer is None else dict(scorer(answer, question.answers))
        for answer in dict.fromkeys(answers)
    }
    return [
        {
            "question": question.id,
            "kind": question.kind,
            "leaf": leaf,
            "scorer": question.scorer,
            **score(trajectory, answer, breakdowns[answer], settings),
        }
        for leaf, (trajectory, answer) in enumerate(zip(trajectories, answers, strict=True))
    ]


def score(
    trajectory: Sequence[Node],
    answer: str | None,
    breakdown: Mapping[str, float],
    settings: Reward,
) -> dict[str, Any]:
    """Return the reward of one trajectory, and what it was made from.

    Only the agent's own turns are read: what a tool result quotes can neither earn nor break
    anything. ``broken_format`` where the format is broken or no answer can be extracted, ``wrong``
    where the score is 0, else the score, plus the bonus for a success with several kinds of tools
    of which a call worked: its outcome is ok.
    """
    faults = _faults(trajectory)
    scored = breakdown.get("score", 0.0)
    success = scored == 1 and not faults
    if faults or answer is None:
        value = settings.broken_format
    elif scored:
        value = scored + settings.many_tools_bonus * (success and len(_tools(trajectory)) > 1)
    else:
        value = settings.wrong
    results = [node for node in trajectory if node.kind == RESULT]
    return {
        "reward": value,
        "score": scored,
        "breakdown": breakdown,
        "success": success,
        "answer": answer,
        "faults": faults,
        "outcome": trajectory[-1].outcome,
        "tool_calls": len(results),
        "tool_errors": sum(node.outcome != Outcome.OK for node in results),
        "response_tokens": sum(len(node.tokens) for node in trajectory[1:]),
        "sampled_tokens": sum(len(node.tokens) for node in sampled(trajectory)),
    }


def _scorer(question: Question, scorers: Mapping[str, Scorer]) -> Scorer:
    if question.scorer not in scorers:
        raise ValueError(
            f"question {question.id}: the scorer {question.scorer!r} is unknown; set it to one of "
            f"{', '.join(sorted(scorers))}"
        )
    return scorers[question.scorer]


def _own_words(trajectory: Sequence[Node]) -> str:
    return _storable("".join(turn.text for turn in sampled(trajectory)))


def _faults(trajectory: Sequence[Node]) -> list[str]:
    """Return what is wrong with the format of a trajectory."""
    forged = trajectory[-1].outcome == Outcome.FORGED_TURN
    return format_faults(_own_words(trajectory), talk.TOOL_TAGS) + ["forged_turn"] * forged


def _tools(trajectory: Sequence[Node]) -> set[str]:
    """Return the tools of which a call worked."""
    return {
        call.tool
        for turn, result in pairwise(trajectory)
        if result.kind == RESULT and result.outcome == Outcome.OK
        if (call := talk.read_call(turn.text))
    }


def _storable(text: str) -> str:
    """Return the text without lone surrogates, which Parquet cannot store."""
    return text.encode(errors="replace").decode()


def length_penalty(tokens: int, budget: int, overlong: Overlong | None) -> float:
    """Return DAPO's soft overlong penalty (arXiv 2503.14476, equation 13), from 0 to -factor.

    It falls over the last share ``overlong.buffer`` of the budget. **Chosen**: a response's length
    counts sampled and observed tokens, as its budget does.
    """
    if overlong is None:
        return 0.0
    buffer = overlong.buffer * budget
    return -overlong.factor * min(1.0, max(0.0, (tokens - (budget - buffer)) / buffer))


def _groups_that_differ(
    rows: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float]
) -> int:
    """Return how many questions have leaves with different values."""
    values: dict[str, set[float]] = {}
    for row in rows:
        values.setdefault(row["question"], set()).add(value(row))
    return sum(len(of_group) > 1 for of_group in values.values())


def _shaped(row: Mapping[str, Any]) -> float:
    return float(row["reward"] + row["length_penalty"])

"""reward: score the leaves of the trees, as ARPO does (arXiv 2507.19849)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
from prefect import task

from params.schema.algorithms import Overlong
from params.schema.reinforce import Reward
from tasks.ledger import prefect_cache, substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import Step
from tasks.scorers import SCORERS, WITHOUT_VERIFIER, Scorer
from tasks.scorers.format import format_faults
from tasks.scorers.maths import WORKERS
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


GROUP = 64  # leaves that are scored side by side
MOST_TIMEOUTS = 64  # different answers of a batch that may use up the verifier's CPU time


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

    Leaves are scored side by side, ``GROUP`` after ``GROUP``. After a group with which at least
    ``most_timeouts`` different answers have used up the verifier's CPU time, later answers that
    only the verifier could compare score 0, as "over_budget". This depends on the answers alone,
    neither on the machine's load nor on the number of processes.
    """
    leaves = [
        (tree.question, leaf, trajectory)
        for tree in trees
        for leaf, trajectory in enumerate(tree.trajectories())
    ]
    rows: list[dict[str, Any]] = []
    slow: set[tuple[str, str]] = set()  # question and answer
    with ThreadPoolExecutor(WORKERS) as pool:
        for first in range(0, len(leaves), GROUP):
            scorers = SCORERS if len(slow) < most_timeouts else WITHOUT_VERIFIER
            scored = partial(_row, settings=settings, scorers=scorers)
            made = list(pool.map(scored, leaves[first : first + GROUP]))
            rows += made
            timeouts = [row for row in made if TIMEOUT in row["breakdown"]]
            slow |= {(row["question"], row["answer"]) for row in timeouts}
    if slow:
        skipped = sum("over_budget" in row["breakdown"] for row in rows)
        print(
            f"reward: {len(slow)} answers used up the CPU time of the mathematics verifier; it is "
            f"not asked any more after {most_timeouts}, which {skipped} answers met",
            flush=True,
        )
    return rows


def _row(
    leaf: tuple[Question, int, Sequence[Node]], settings: Reward, scorers: Mapping[str, Scorer]
) -> dict[str, Any]:
    question, number, trajectory = leaf
    return {
        "question": question.id,
        "kind": question.kind,
        "leaf": number,
        "scorer": question.scorer,
        **score(trajectory, question, settings, scorers),
    }


def score(
    trajectory: Sequence[Node],
    question: Question,
    settings: Reward,
    scorers: Mapping[str, Scorer] = SCORERS,
) -> dict[str, Any]:
    """Return the reward of one trajectory with its breakdown.

    Only the agent's own turns are read: what a tool result quotes can neither earn nor break
    anything. ``broken_format`` where the format is broken or no answer can be extracted, ``wrong``
    where the score is 0, else the score, plus the bonus for a success with several kinds of tools
    of which a call worked: its outcome is ok.
    Raises ValueError for a question whose scorer is unknown.
    """
    own_words = _storable("".join(turn.text for turn in sampled(trajectory)))
    faults = format_faults(own_words, talk.TOOL_TAGS)
    if trajectory[-1].outcome == Outcome.FORGED_TURN:
        faults.append("forged_turn")
    answer = talk.final_answer(own_words)
    scorer = _scorer(question, scorers)
    breakdown = {} if answer is None else dict(scorer(answer, question.answers))
    scored = breakdown.get("score", 0.0)
    success = scored == 1 and not faults
    results = [node for node in trajectory if node.kind == RESULT]
    tools = {
        call.tool
        for turn, result in pairwise(trajectory)
        if result.kind == RESULT and result.outcome == Outcome.OK
        if (call := talk.read_call(turn.text))
    }
    if faults or answer is None:
        value = settings.broken_format
    elif scored:
        value = scored + settings.many_tools_bonus * (success and len(tools) > 1)
    else:
        value = settings.wrong
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

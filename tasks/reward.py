"""reward: score the leaves of the trees, as ARPO does (arXiv 2507.19849)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pyarrow as pa

from params.schema.algorithms import Overlong
from params.schema.base import Frozen
from params.schema.judge import Judge
from params.schema.reinforce import RewardPart
from tasks.ledger import substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.rewards import judging, reward_parts, scoring
from tasks.rewards.judging import OpenPolicy
from tasks.rewards.scoring import TAGS, Estimates, Reader
from tasks.trees.labels import Labels
from tasks.trees.tables import load_trees, read_rows, write_table
from tasks.trees.tree import Tree, masked_leaves

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
        "sound": pa.bool_(),  # nothing is, an answer is there if one is due; or it does not count
        "outcome": pa.string(),  # how the last turn ended
        "tool_calls": pa.int32(),
        "tool_errors": pa.int32(),
        "response_tokens": pa.int32(),  # sampled and observed
        "sampled_tokens": pa.int32(),
        # whatever the format; null where it means nothing (tasks/scorers/lenient.py)
        "lenient": pa.bool_(),  # the answer stands anywhere in the last turn
        "last_number": pa.bool_(),  # it is the last number there
    }
)

PARTS = pa.schema(
    {
        "question": pa.string(),
        "leaf": pa.int32(),
        "part": pa.string(),  # of the recipe's list
        "value": pa.float64(),  # what it added to the reward
    }
)


@dataclass(frozen=True)
class RewardInputs:
    """What decides rewards."""

    trees: Artifact
    settings: Sequence[RewardPart]
    overlong: Overlong | None  # the penalty on responses near the budget; None: length is free
    response_tokens: int  # the budget of a response
    # of parts and scorers (reward_parts.py)
    sources: Mapping[str, str] = field(default_factory=dict)
    # what the turns are read with: the dialect's settings by name, and the names of the tools
    dialect: Mapping[str, Frozen] = field(default_factory=dict)
    tools: tuple[str, ...] = ()
    judge: Judge | None = None  # None: no question names it, and the protocol does not ask it
    prompt: str = ""  # of the judge: the text of its file
    papers: Mapping[str, str] | None = None  # scorers of sets in the papers; None: verified answers
    judges: tuple[Artifact, ...] = ()  # policies of this machine among the judge's models
    sampling: tuple[Frozen, ...] = ()  # engine, machine and dialogue, which they are sampled with
    estimates: Artifact | None = None  # the reward model's; None: there is none
    labels: Labels | None = None  # of the questions on which the rule watches the reward model
    labelled_only: bool = False  # nothing else is scored
    masked: tuple[str, ...] = ()  # outcomes whose leaves count in no spread


@substeps.recorded
def reward(
    step: SubStep,
    inputs: RewardInputs,
    *,
    reader: Reader = TAGS,
    open_policy: OpenPolicy | None = None,
) -> Record:
    """Score every leaf.

    Artifacts: ``rewards``, a row a leaf with the reward's breakdown; ``parts``, a row for each leaf
    and part of the reward; ``verdicts``, what a judge has said, where one is asked. ``reader``
    reads the agent's turns: the dialect. ``open_policy`` opens policies of this machine that judge.
    Raises RuntimeError where the judge cannot be asked.
    """
    began = time.perf_counter()
    trees = load_trees(Path(inputs.trees.path))
    if inputs.papers is not None:
        graded = partial(judging.as_in_papers, of_sets=inputs.papers)
        trees = [replace(tree, question=graded(tree.question)) for tree in trees]
    estimates = load_estimates(inputs.estimates)
    with ExitStack() as stack:
        judge = None
        if inputs.judge:
            opened = judging.open_judge(inputs.judge, inputs.prompt, step.recipe, open_policy)
            judge = stack.enter_context(opened)
        hidden = _hidden(trees, inputs)
        rows = scoring.score_trees(
            trees,
            inputs.settings,
            reader=reader,
            judge=judge,
            estimates=estimates,
            hidden=hidden,
        )
        if judge:
            judge.save(step.out)
    for row in rows:
        row["length_penalty"] = length_penalty(
            row["response_tokens"], inputs.response_tokens, inputs.overlong
        )
    counting = _counting(rows, trees, inputs.masked)
    write_table(pa.Table.from_pylist(rows, schema=TABLE), step.out / "rewards.parquet")
    write_table(part_table(rows), step.out / "parts.parquet")
    return {
        "metrics": _metrics(rows, counting, hidden, estimates, inputs),
        "seconds": {"reward": time.perf_counter() - began},
        "groups_with_spread": _groups_that_differ(counting, lambda row: row["score"]),
        "without_spread": _alike(counting),
    }


def _counting(
    rows: Sequence[dict[str, Any]], trees: Sequence[Tree], outcomes: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the rows of the leaves that are not masked."""
    masked = {
        (tree.question.id, leaf)
        for tree in trees
        for leaf, left_out in enumerate(masked_leaves(tree, outcomes))
        if left_out
    }
    return [row for row in rows if (row["question"], row["leaf"]) not in masked]


def _metrics(
    rows: Sequence[Mapping[str, Any]],
    counting: Sequence[Mapping[str, Any]],
    hidden: Collection[str],
    estimates: Estimates,
    inputs: RewardInputs,
) -> dict[str, float]:
    """Return the metrics of a batch.

    ``counting``: the rows of leaves that are not masked; ``hidden``: the questions whose answers
    are not scored.
    """
    questions = {row["question"] for row in rows}
    return {
        "reward": sum(row["reward"] for row in rows) / len(rows),
        "reward_deviation": _deviation_of_questions(rows),
        **_scored([row for row in rows if row["question"] not in hidden]),
        "broken_format": sum(bool(row["faults"]) for row in rows) / len(rows),
        "groups_without_spread": 1 - _groups_that_differ(counting, _shaped) / len(questions),
        **({} if reward_parts.is_default(inputs.settings) else _means_of_parts(rows)),
        **_without_verdict(rows),
        **(drift(rows, estimates, inputs.labels) if inputs.labels and estimates else {}),
        **({"scored_share": 1 - len(hidden) / len(questions)} if inputs.labelled_only else {}),
    }


def _hidden(trees: Sequence[Tree], inputs: RewardInputs) -> set[str]:
    """Return the questions whose answers are not scored."""
    labels = inputs.labels if inputs.labelled_only else None
    return {tree.question.id for tree in trees if labels and not labels.role(tree.question.id)}


def _scored(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the means over the answers that were scored; 0 where none was."""
    return {
        name: sum(row[name] for row in rows) / max(1, len(rows)) for name in ("success", "score")
    }


def load_estimates(table: Artifact | None) -> Estimates:
    """Read the reward model's estimates; {} where there are none."""
    rows = read_rows(Path(table.path)) if table else []
    return {(row["question"], row["leaf"]): row["estimate"] for row in rows}


def drift(
    rows: Sequence[Mapping[str, Any]], estimates: Estimates, labels: Labels
) -> dict[str, float]:
    """Return how far the reward model is from the rule, on the questions with labels.

    ``model_estimate`` and its deviation are over all questions. ``model_gap`` is the mean, over
    held-out questions, of the mean estimate less the share of successes; it rises where the policy
    learns what the model likes and the rule does not. Questions that train the model are left out,
    since it may know their labels by heart.
    """
    every = _by_question(rows, lambda row: estimates[row["question"], row["leaf"]])
    right = _by_question(rows, lambda row: float(row["success"]))
    labelled = [question for question in every if labels.role(question)]
    sample = [question for question in labelled if labels.role(question) != "train"]
    gaps = [every[question] - right[question] for question in sample]
    return {
        "model_estimate": fmean(every.values()),
        "model_estimate_deviation": float(pstdev(every.values())),
        "held_out_questions": float(len(sample)),
        "model_gap": fmean(gaps) if gaps else 0.0,
        "model_gap_deviation": float(pstdev(gaps)) if gaps else 0.0,
        "labelled_success": fmean(right[name] for name in labelled) if labelled else 0.0,
    }


def part_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return a row of ``PARTS`` for each part of each leaf's reward."""
    values = [
        {"question": row["question"], "leaf": row["leaf"], "part": part, "value": value}
        for row in rows
        for part, value in row["parts"].items()
    ]
    return pa.Table.from_pylist(values, schema=PARTS)


def _means_of_parts(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of each part of the reward, as a metric."""
    return {
        f"reward_{part}": sum(row["parts"][part] for row in rows) / len(rows)
        for part in rows[0]["parts"]
    }


def _without_verdict(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the share of judged answers that lack a verdict; {} where none is judged."""
    lacking = [one for row in rows if (one := row["breakdown"].get("without_verdict")) is not None]
    return {"without_verdict": sum(one > 0 for one in lacking) / len(lacking)} if lacking else {}


def length_penalty(tokens: int, budget: int, overlong: Overlong | None) -> float:
    """Return DAPO's soft overlong penalty (arXiv 2503.14476, equation 13), from 0 to -factor.

    It falls over the last share ``overlong.buffer`` of the budget. **Chosen**: a response's length
    counts sampled and observed tokens, as its budget does.
    """
    if overlong is None:
        return 0.0
    buffer = overlong.buffer * budget
    return -overlong.factor * min(1.0, max(0.0, (tokens - (budget - buffer)) / buffer))


def _deviation_of_questions(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the standard deviation, over questions, of the mean reward of their leaves."""
    return float(pstdev(_by_question(rows, lambda row: row["reward"]).values()))


def _by_question(
    rows: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float]
) -> dict[str, float]:
    """Return the mean of a value over the leaves of each question."""
    values: dict[str, list[float]] = {}
    for row in rows:
        values.setdefault(row["question"], []).append(value(row))
    return {question: fmean(values_of_leaves) for question, values_of_leaves in values.items()}


def _groups_that_differ(
    rows: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float]
) -> int:
    """Return how many questions have leaves with different values."""
    values: dict[str, set[float]] = {}
    for row in rows:
        values.setdefault(row["question"], set()).add(value(row))
    return sum(len(of_group) > 1 for of_group in values.values())


def _alike(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the questions whose leaves all have the same score."""
    scores: dict[str, set[float]] = {}
    for row in rows:
        scores.setdefault(row["question"], set()).add(row["score"])
    return [question for question, found in scores.items() if len(found) == 1]


def _shaped(row: Mapping[str, Any]) -> float:
    return float(row["reward"] + row["length_penalty"])

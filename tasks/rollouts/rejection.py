"""Rejection sampling: which sampled trajectories become SFT traces, and why the others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from params.schema.agent import Dialogue
from tasks.dialects.contract import Dialect, contexts_of
from tasks.dialects.observation_text import shown_text
from tasks.rollouts.paths import NO_TOKENS
from tasks.trees.outcomes import INFRASTRUCTURE, Outcome
from tasks.trees.tree import PROMPT, TURN, Tree, response, sampled

CUT, BROKEN, WRONG = "cut", "broken_format", "wrong_answer"  # reasons
DUPLICATE, TOO_MANY, TOO_LONG = "duplicate", "too_many", "too_long"
CUTS = (Outcome.CUT, Outcome.OUT_OF_SPACE)
FAILURES = (*INFRASTRUCTURE, Outcome.WORLD_BROKEN)


@dataclass(frozen=True)
class Attempt:
    """A sampled trajectory and what came of it."""

    tree: Tree
    leaf: int  # its number in the tree
    reason: str  # why it is no trace; "" where it is one
    detail: str = ""


def select(tree: Tree, rows: Sequence[Mapping[str, Any]], most: int) -> list[Attempt]:
    """Decide on each leaf of a tree, in order; at most ``most`` are kept.

    ``rows``: the leaves' rows of scoring (tasks/rewards/scoring.py). Of trajectories with equal
    turns the first is kept.
    """
    attempts: list[Attempt] = []
    seen: set[bytes] = set()
    kept_count = 0
    for leaf, (trajectory, row) in enumerate(zip(tree.trajectories(), rows, strict=True)):
        reason, detail = fault(row, world=tree.of_world)
        if not reason:
            written = b"|".join(turn.tokens.tobytes() for turn in sampled(trajectory))
            reason = DUPLICATE if written in seen else TOO_MANY if kept_count == most else ""
            seen.add(written)
            kept_count += not reason
        attempts.append(Attempt(tree, leaf, reason, detail))
    return attempts


def fault(row: Mapping[str, Any], *, world: bool) -> tuple[str, str]:
    """Return why a scored trajectory is wrong, with a detail; ("", "") where it is right.

    An episode of a ``world`` needs no answer: its score says whether it was solved.
    """
    outcome = row["outcome"]
    if outcome in FAILURES:
        return str(outcome), ""
    if outcome in CUTS:
        return CUT, str(outcome)
    if row["faults"] or (row["answer"] is None and not world):
        return BROKEN, ", ".join(row["faults"]) or str(outcome)
    if row["score"] != 1:
        return WRONG, f"score {row['score']:g}" if world else str(row["answer"])
    return "", ""


def reasons(attempts: Sequence[Attempt]) -> Counter[str]:
    """Count the attempts by the reason that they are no trace; "" counts the traces."""
    return Counter(attempt.reason for attempt in attempts)


# ---------------------------------------------------------------- rows of the table of traces


def as_sampled(attempt: Attempt) -> list[dict[str, Any]]:
    """Return the table's rows of a trace with the token ids that were sampled, one a context.

    A context begins at a prompt: a growing dialogue has one, and each step of a fresh prompt its
    own. Only turns are trained on.
    """
    tree = attempt.tree
    rows = []
    for context in tree.contexts(tree.leaves[attempt.leaf]):
        nodes = [tree.nodes[index] for index in context]
        if not any(node.kind == TURN for node in nodes):
            continue
        mask = np.repeat(
            [node.kind == TURN for node in nodes], [len(node.tokens) for node in nodes]
        )
        tokens = np.concatenate([NO_TOKENS, *(node.tokens for node in nodes)])
        text = "".join(node.text for node in nodes if node.kind != PROMPT)
        rows.append(_row(attempt, text, tokens, mask))
    return rows


def rewritten(
    attempt: Attempt, dialect: Dialect, dialogue: Dialogue, end_token: str
) -> list[dict[str, Any]]:
    """Return the table's rows of a growing dialogue, one a context, encoded by another tokenizer.

    ``dialect`` is the student's; ``end_token`` is the teacher's, which ends a turn's text.
    """
    tree = attempt.tree
    trajectory = list(tree.trajectories())[attempt.leaf]
    parts = [(node.text.removesuffix(end_token), node.kind == TURN) for node in trajectory[1:]]
    first = trajectory[0].observation
    shown = shown_text((), first, dialogue) if first else ""
    text = response(trajectory)
    contexts = contexts_of(dialect, tree.question, parts, shown)
    return [_row(attempt, text, tokens, mask) for tokens, mask in contexts]


def _row(attempt: Attempt, text: str, tokens: Any, mask: Any) -> dict[str, Any]:
    question = attempt.tree.question
    return {
        "question_id": question.id,
        "split": "train",
        "kind": question.kind,
        "flaw": "none",
        "text": text,
        "tokens": tokens,
        "trained": mask,
    }

"""Expectations of the table of trajectories of all iterations: one row a leaf of a question's tree.

Columns: iteration, leaf (int, from 0), question_id, outcome (how the leaf ended), text (str),
sampled_tokens, observed_tokens (of tool results, without prompts), logprob_count, tool_calls (acts
that were executed, all int), highest_logprob (nats), lowest_entropy, highest_entropy (of the
sampled tokens, divided by ln|V|).
"""

from __future__ import annotations

from collections.abc import Collection

import pandas as pd

from tasks.gates.gate import (
    Expectation,
    among,
    between,
    legible,
    mean_between,
    rows_between,
    unusable,
)
from tasks.gates.leaves import group_columns

GROUP = ["iteration", "question_id"]
NAMES = ("question_id", "outcome")
COUNTS = ("sampled_tokens", "observed_tokens", "logprob_count", "tool_calls")
MEASURES = ("highest_logprob", "lowest_entropy", "highest_entropy")
COLUMNS = (*GROUP, "leaf", "outcome", "text", *COUNTS, *MEASURES)

ROUNDING = 1e-5  # a uniform distribution's entropy over ln|V|, in float32, may pass 1
MOST_FAILURES = 0.9


def prepare(table: pd.DataFrame, failures: Collection[str]) -> pd.DataFrame:
    """Add the columns that ``expectations`` check. Raises ValueError for a missing column.

    failures: the outcomes that count as a failed rollout.
    """
    table = table.reset_index(drop=True)
    faults = unusable("trajectories", table, COLUMNS, NAMES)
    table = table.assign(unusable=faults, **legible(table, NAMES))
    table = table.assign(
        **group_columns(table, GROUP),
        logprobs_too_many=table["logprob_count"] - table["sampled_tokens"],
        response_tokens=table["sampled_tokens"] + table["observed_tokens"],
        failed=table["outcome"].isin(list(failures)).astype(float),
    )
    return table.set_index([*GROUP, "leaf"], drop=False)


def expectations(
    *,
    leaves: int,
    outcomes: Collection[str],
    response_tokens: int,
    tool_calls: int,
) -> list[Expectation]:
    """Return the expectations for ``leaves`` (L) leaves a group.

    outcomes: all known names. response_tokens, tool_calls: the limits of a trajectory.
    """
    lowest, highest = -ROUNDING, 1 + ROUNDING
    return [
        rows_between("there are trajectories", 1, None),
        among("every value is present and finite, names are printable", "unusable", [""]),
        between(f"a question has {leaves} leaves an iteration", "group_size", leaves, leaves),
        between("a group's leaves are numbered from 0 on, each once", "leaf_off_by", 0, 0),
        among("the outcome is known", "outcome", outcomes),
        between("at least one token is sampled", "sampled_tokens", 1, None),
        between("there is one logprob a sampled token", "logprobs_too_many", 0, 0),
        between("no logprob is above 0", "highest_logprob", None, 0),
        between("no entropy is below 0", "lowest_entropy", lowest, highest),
        between("no entropy is above 1", "highest_entropy", lowest, highest),
        between(
            f"the response has at most {response_tokens} tokens",
            "response_tokens",
            1,
            response_tokens,
        ),
        between(f"there are at most {tool_calls} tool calls", "tool_calls", 0, tool_calls),
        mean_between(
            f"at most {MOST_FAILURES:.0%} of the leaves failed", "failed", 0, MOST_FAILURES
        ),
    ]

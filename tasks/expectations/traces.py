"""What must hold of the traces that the cold start learns from.

Columns: question_id (str), split (str), kind (str), flaw (str: "none", or how the scripted expert
was wrong), text (str: the whole response, tool results included), tokens (list[int]: prompt and
response), trained (list[bool]: True on the agent's own tokens).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pandas as pd

from tasks.gate import Expectation, among, between, mean_between, rows_between, unusable

COLUMNS = ("question_id", "split", "kind", "flaw", "text", "tokens", "trained")
RESULT = re.compile(r"<result>.*?</result>", re.DOTALL)


def prepare(table: pd.DataFrame, training: Collection[str], tools: Sequence[str]) -> pd.DataFrame:
    """Add the columns that ``expectations`` judges; ValueError for a column that the table lacks.

    training: ids of the training questions. tools: names of the tools, which are also their tags.
    """
    table = table.reset_index(drop=True)
    faults = unusable("traces", table, COLUMNS)
    tokens, trained = table["tokens"].map(_array), table["trained"].map(_array)
    # What a tool gave back may quote a tag; only the agent's own tags count.
    own_text = table["text"].map(lambda text: RESULT.sub("<result/>", str(text)))
    table = table.assign(
        trace=range(len(table)),
        unusable=faults,
        of_training=table["question_id"].isin(list(training)),
        tokens_length=tokens.map(len),
        flags_too_many=trained.map(len) - tokens.map(len),
        trained_tokens=trained.map(np.count_nonzero),
        first_token_trained=trained.map(lambda flags: bool(flags[:1].any())),
        answer_tags=own_text.map(lambda text: "".join(re.findall("</?answer>", text))),
        call_fault=own_text.map(lambda text: call_fault(text, tools)),
        flawed=(table["flaw"] != "none").astype(float),
    )
    return table.set_index(["trace", "question_id"])


def expectations(context: int, flawed: tuple[float, float] | None = None) -> list[Expectation]:
    """``context``: tokens a trace may have; ``flawed``: the expected share of flawed traces."""
    shares = (
        [mean_between(f"{flawed[0]:.0%} to {flawed[1]:.0%} are flawed", "flawed", *flawed)]
        if flawed
        else []
    )
    return [
        rows_between("there are traces", 1, None),
        among("every value is present", "unusable", [""]),
        among("the question is one of the training questions", "of_training", [True]),
        between(f"there are 1 to {context} tokens", "tokens_length", 1, context),
        between("there is one trained flag a token", "flags_too_many", 0, 0),
        between("at least one token is trained", "trained_tokens", 1, None),
        among("the first token, of the prompt, is not trained", "first_token_trained", [False]),
        among("there is exactly one answer block", "answer_tags", ["<answer></answer>"]),
        among("each tool call is closed before its result", "call_fault", [""]),
        *shares,
    ]


def call_fault(text: str, tools: Sequence[str]) -> str:
    """The tags of calls and results, in order, where they do not pair up; "" where they do.

    A call is closed before the next one begins and has at most one result, right after it;
    ``text`` has ``<result/>`` for each result.
    """
    names = "|".join(map(re.escape, tools))
    tags = "".join(re.findall(rf"</?(?:{names}|result)>|<result/>", text))
    return "" if re.fullmatch(rf"(?:<({names})></\1>(?:<result/>)?)*", tags) else tags


def _array(values: Any) -> np.ndarray:
    """A row's list; a missing one has no elements, which ``unusable`` reports."""
    return np.asarray(values) if isinstance(values, list | tuple | np.ndarray) else np.empty(0)

"""Expectations of the table of traces that the cold start learns from.

Columns: question_id (str), split (str), kind (str), flaw (str: "none", or how the scripted expert
was wrong), text (str: the whole response, tool results included), parts (list of (text, whether
the agent wrote it), which make up that text: the agent's turns, and the tool results between them),
tokens (list[int]: prompt and response), trained (list[bool]: True on the agent's own tokens).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
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
from tasks.gates.texts import damage, prose_fault
from tasks.trees.dialogue import TOOL_TAGS, final_answer

Parts = Sequence[tuple[str, bool]]

NAMES = ("question_id", "split", "kind", "flaw")
COLUMNS = (*NAMES, "text", "parts", "tokens", "trained")
TAG = re.compile(rf"</?(?:{'|'.join(TOOL_TAGS)}|result)>")
ANSWER_TAG = re.compile("</?answer>")
# Code and the content of \boxed{} may have braces of their own.
NO_PROSE = re.compile(rf"<({'|'.join(TOOL_TAGS)}|answer)>.*?</\1>", re.DOTALL)


def prepare(table: pd.DataFrame, training: Collection[str], tools: Sequence[str]) -> pd.DataFrame:
    """Add the columns that ``expectations`` check. Raises ValueError for a missing column.

    training: ids of the training questions. tools: those of the recipe's dialogue.
    """
    table = table.reset_index(drop=True)
    faults = unusable("traces", table, COLUMNS, NAMES)
    tokens, trained = table["tokens"].map(_array), table["trained"].map(_array)
    parts = [list(each) if _listed(each) else [] for each in table["parts"]]
    turns = [[text for text, own in each if own] for each in parts]
    table = table.assign(
        **legible(table, NAMES),
        trace=range(len(table)),
        unusable=faults,
        parts_fault=[parts_fault(*each) for each in zip(parts, table["text"], strict=True)],
        tokens_length=tokens.map(len),
        flags_too_many=trained.map(len) - tokens.map(len),
        trained_tokens=trained.map(np.count_nonzero),
        first_token_trained=trained.map(lambda flags: bool(flags[:1].any())),
        call_fault=[call_fault(each, tools) for each in turns],
        answer_fault=[answer_fault(each) for each in turns],
        words_fault=[words_fault(each) for each in turns],
        flawed=(table["flaw"] != "none").astype(float),
    )
    table["of_training"] = table["question_id"].isin(list(training))
    return table.set_index(["trace", "question_id"])


def expectations(context: int, flawed: tuple[float, float] | None = None) -> list[Expectation]:
    """Return the expectations for traces of at most ``context`` tokens.

    flawed: the expected share of flawed traces, (lowest, highest).
    """
    shares = (
        [mean_between(f"{flawed[0]:.0%} to {flawed[1]:.0%} are flawed", "flawed", *flawed)]
        if flawed
        else []
    )
    return [
        rows_between("there are traces", 1, None),
        among("every value is present, ids and kinds are printable", "unusable", [""]),
        among("the question is one of the training questions", "of_training", [True]),
        among("turns and tool results alternate and make up the text", "parts_fault", [""]),
        among("each tool result follows one call of a tool at hand", "call_fault", [""]),
        among("exactly one answer block, not empty, ends the trace", "answer_fault", [""]),
        among("the agent's words are not damaged or a template's remains", "words_fault", [""]),
        between(f"there are 1 to {context} tokens", "tokens_length", 1, context),
        between("there is one trained flag a token", "flags_too_many", 0, 0),
        between("at least one token is trained", "trained_tokens", 1, None),
        among("the first token, of the prompt, is not trained", "first_token_trained", [False]),
        *shares,
    ]


def trace_fault(parts: Parts, tools: Sequence[str]) -> str:
    """Describe the first thing that is wrong with a written trace, or return ""."""
    turns = [text for text, own in parts if own]
    whole = "".join(text for text, _ in parts)
    return (
        parts_fault(parts, whole)
        or call_fault(turns, tools)
        or answer_fault(turns)
        or words_fault(turns)
    )


def parts_fault(parts: Parts, text: str) -> str:
    """Describe where parts do not alternate or differ from the text, or return ""."""
    for number, (part, own) in enumerate(parts):
        if own != (number % 2 == 0):
            return f"part {number} is a {'turn' if own else 'tool result'} out of turn"
        if not own and not (part.startswith("<result>") and part.endswith("</result>")):
            return f"part {number} is a tool result without its tags"
    if len(parts) % 2 == 0:
        return "ends with a tool result" if parts else "no turn"
    return "" if "".join(part for part, _ in parts) == text else "the text differs from its parts"


def call_fault(turns: Sequence[str], tools: Sequence[str]) -> str:
    """Describe what is wrong with the calls of a trace, or return "".

    Each turn but the last must end with its only call, of one of ``tools``; the last makes none.
    Only turns are searched: a tool result may quote any tag.
    """
    for number, turn in enumerate(turns):
        tags = TAG.findall(turn)
        if not tags and number == len(turns) - 1:
            continue
        tool = tags[0].strip("</>") if tags else ""
        if not tags:
            return f"turn {number} has no call before its result"
        if tags != [f"<{tool}>", f"</{tool}>"] or not turn.rstrip().endswith(tags[1]):
            return f"turn {number} has the tags {''.join(tags)}"
        if tool not in tools:
            return f"turn {number} calls {tool}, which the recipe does not name"
        if number == len(turns) - 1:
            return f"turn {number} ends with a call without a result"
    return ""


def answer_fault(turns: Sequence[str]) -> str:
    """Describe what is wrong with the answer of a trace, or return ""."""
    tags = [(number, tag) for number, turn in enumerate(turns) for tag in ANSWER_TAG.findall(turn)]
    last = len(turns) - 1
    if [tag for _, tag in tags] != ["<answer>", "</answer>"]:
        return f"answer tags {''.join(tag for _, tag in tags)}" if tags else "no answer block"
    if any(number != last for number, _ in tags):
        return f"answers in turn {tags[0][0]} and goes on"
    answer = final_answer(turns[last])
    if answer is None:
        return "no \\boxed{} in the answer"
    return "" if answer else "an empty answer"


def words_fault(turns: Sequence[str]) -> str:
    """Describe damage or remains of a template in the turns, or return ""."""
    for number, turn in enumerate(turns):
        if fault := damage(turn) or prose_fault(NO_PROSE.sub("", turn)):
            return f"turn {number}: {fault}"
    return ""


def _listed(values: Any) -> bool:
    return isinstance(values, list | tuple | np.ndarray)


def _array(values: Any) -> np.ndarray:
    """Return a row's list; empty for a missing one, which ``unusable`` reports."""
    return np.asarray(values) if _listed(values) else np.empty(0)

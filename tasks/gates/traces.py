"""Expectations of the table of traces that the cold start learns from.

Columns: question_id (str), split (str), kind (str), flaw (str: "none", or how the scripted expert
was wrong), text (str: the whole response, tool results included), parts (list of (text, whether
the agent wrote it), which make up that text: the agent's turns, and the tool results between them),
tokens (list[int]: prompt and response), trained (list[bool]: True on the agent's own tokens).
A trace of several contexts has a row each; ``begins`` (bool), if there, says which is its first.
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
from tasks.trees.dialogue import any_tool, final_answer

Parts = Sequence[tuple[str, bool]]

NAMES = ("question_id", "split", "kind", "flaw")
COLUMNS = (*NAMES, "text", "parts", "tokens", "trained")
ENDING = {
    False: "exactly one answer block, not empty, ends the trace",
    True: "no answer block comes before the end of the episode",
}
TEXTS = ("parts_fault", "call_fault", "answer_fault", "words_fault")  # columns of texts in tags
THOUGHT_TAG = re.compile("</?think>")
ANSWER_TAG = re.compile("</?answer>")


def prepare(
    table: pd.DataFrame,
    training: Collection[str],
    tools: Sequence[str],
    *,
    world: bool = False,
    several: bool = False,
) -> pd.DataFrame:
    """Add the columns that ``expectations`` check. Raises ValueError for a missing column.

    training: ids of the training questions. tools: names of those that the agent has. world:
    whether they are episodes of a world, which need no answer and may end with an act. several:
    whether a turn may make several calls, with as many results after it.
    """
    table = table.reset_index(drop=True)
    faults = unusable("traces", table, COLUMNS, NAMES)
    begins = table["begins"] if "begins" in table else pd.Series(True, table.index)
    tokens, trained = table["tokens"].map(_array), table["trained"].map(_array)
    parts = [list(each) if _listed(each) else [] for each in table["parts"]]
    turns = [[text for text, is_turn in each if is_turn] for each in parts]
    table = table.assign(
        **legible(table, NAMES),
        trace=range(len(table)),
        unusable=faults,
        parts_fault=[
            parts_fault(*each, world, several) for each in zip(parts, table["text"], strict=True)
        ],
        tokens_length=tokens.map(len),
        flags_too_many=trained.map(len) - tokens.map(len),
        trained_tokens=trained.map(np.count_nonzero),
        first_token_trained=trained.map(lambda flags: bool(flags[:1].any())),
        call_fault=[
            call_fault(each, tools, world, _answers(whole) if several else ())
            for each, whole in zip(turns, parts, strict=True)
        ],
        answer_fault=[answer_fault(each, world) for each in turns],
        words_fault=[words_fault(each, tools) for each in turns],
        flawed=(table["flaw"] != "none").astype(float).where(begins),
    )
    table["of_training"] = table["question_id"].isin(list(training))
    return table.set_index(["trace", "question_id"])


def expectations(
    context: int, flawed: tuple[float, float] | None = None, *, world: bool = False
) -> list[Expectation]:
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
        among(ENDING[world], "answer_fault", [""]),
        among("the agent's words are not damaged or a template's remains", "words_fault", [""]),
        between(f"there are 1 to {context} tokens", "tokens_length", 1, context),
        between("there is one trained flag a token", "flags_too_many", 0, 0),
        between("at least one token is trained", "trained_tokens", 1, None),
        among("the first token, of the prompt, is not trained", "first_token_trained", [False]),
        *shares,
    ]


def sampled_expectations(context: int) -> list[Expectation]:
    """Return the expectations for traces that a policy has sampled.

    Their texts are as the dialect writes them, and scoring has found them sound.
    """
    return [each for each in expectations(context) if each.arguments.get("column") not in TEXTS]


def trace_fault(
    parts: Parts, tools: Sequence[str], *, world: bool = False, several: bool = False
) -> str:
    """Describe the first thing that is wrong with a written trace, or return "".

    several: whether a turn may make several calls.
    """
    turns = [text for text, is_turn in parts if is_turn]
    whole = "".join(text for text, _ in parts)
    return (
        parts_fault(parts, whole, world, several)
        or call_fault(turns, tools, world, _answers(parts) if several else ())
        or answer_fault(turns, world)
        or words_fault(turns, tools)
    )


def parts_fault(parts: Parts, text: str, world: bool = False, several: bool = False) -> str:
    """Describe where parts do not alternate or differ from the text, or return "".

    several: results may follow each other.
    """
    for number, (part, is_turn) in enumerate(parts):
        follows_turn = number > 0 and parts[number - 1][1]
        joins = several and number > 0 and not is_turn
        if is_turn == follows_turn and not joins:
            return f"part {number} is a {'turn' if is_turn else 'tool result'} out of turn"
        in_tags = part.startswith("<result>") and part.endswith("</result>")
        if not is_turn and not in_tags and not world:
            return f"part {number} is a tool result without its tags"
    if not parts or not parts[-1][1]:
        return "ends with a tool result" if parts else "no turn"
    return "" if "".join(part for part, _ in parts) == text else "the text differs from its parts"


def _answers(parts: Parts) -> list[int]:
    """Count the results after each turn."""
    counts: list[int] = []
    for _, is_turn in parts:
        if is_turn:
            counts.append(0)
        elif counts:
            counts[-1] += 1
    return counts


def call_fault(
    turns: Sequence[str], tools: Sequence[str], world: bool = False, results: Sequence[int] = ()
) -> str:
    """Describe what is wrong with the calls of a trace, or return "".

    Each turn but the last must end with its only call, of one of ``tools``, or with as many calls
    as it has ``results``; the last makes none, except in a ``world``, which an act may end.
    Only turns are searched: a tool result may quote any tag.
    """
    tag = re.compile(rf"</?(?:{any_tool(tools)}|result)>")
    for number, turn in enumerate(turns):
        tags = tag.findall(turn)
        if not tags and number == len(turns) - 1:
            continue
        called = [tag.strip("</>") for tag in tags[::2]]
        if not tags:
            return f"turn {number} has no call before its result"
        if tags != [f"<{slash}{tool}>" for tool in called for slash in ("", "/")]:
            return f"turn {number} has the tags {''.join(tags)}"
        count = max(1, results[number]) if results else 1
        if len(called) != count or not turn.rstrip().endswith(tags[-1]):
            beside = f" before {count} results" if results else ""
            return f"turn {number} has the tags {''.join(tags)}{beside}"
        if unknown := [tool for tool in called if tool not in tools]:
            return f"turn {number} calls {unknown[0]}, which the recipe does not name"
        if number == len(turns) - 1 and not world:
            return f"turn {number} ends with a call without a result"
    return ""


def answer_fault(turns: Sequence[str], world: bool = False) -> str:
    """Describe what is wrong with the answer of a trace, or return ""; a ``world`` needs none."""
    tags = [(number, tag) for number, turn in enumerate(turns) for tag in ANSWER_TAG.findall(turn)]
    last = len(turns) - 1
    if world and not tags:
        return ""
    if [tag for _, tag in tags] != ["<answer>", "</answer>"]:
        return f"answer tags {''.join(tag for _, tag in tags)}" if tags else "no answer block"
    if any(number != last for number, _ in tags):
        return f"answers in turn {tags[0][0]} and goes on"
    if not turns[last].rstrip().endswith("</answer>"):
        return "text after the answer, which no agent writes: its turn ends there"
    answer = final_answer(turns[last])
    if answer is None:
        return "no \\boxed{} in the answer"
    return "" if answer else "an empty answer"


def words_fault(turns: Sequence[str], tools: Sequence[str] = ()) -> str:
    """Describe damage or remains of a template in the turns, or return ""."""
    # Code and the content of \boxed{} may have braces of their own.
    no_prose = re.compile(rf"<({any_tool(tools)}|answer)>.*?</\1>", re.DOTALL)
    for number, turn in enumerate(turns):
        prose = no_prose.sub("", turn)
        if fault := damage(turn) or prose_fault(prose) or thought_fault(prose):
            return f"turn {number}: {fault}"
    return ""


def thought_fault(prose: str) -> str:
    """Describe thoughts of a turn that are not closed, or are inside another one, or return ""."""
    tags = THOUGHT_TAG.findall(prose)
    return "" if tags == ["<think>", "</think>"] * (len(tags) // 2) else f"the tags {''.join(tags)}"


def _listed(values: Any) -> bool:
    return isinstance(values, list | tuple | np.ndarray)


def _array(values: Any) -> np.ndarray:
    """Return a row's list; empty for a missing one, which ``unusable`` reports."""
    return np.asarray(values) if _listed(values) else np.empty(0)

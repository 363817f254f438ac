"""What the cold start learns from in a trace: prompts and turns as a rollout would have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from params.schema.agent import Dialogue
from tasks.dialects.contract import Dialect, Exchange
from tasks.dialects.observation_text import shown_text
from tasks.questions import trace_tables
from tasks.questions.experts import Parts, Trace

NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True)
class TrainingSample:
    """What is learned from at once: a whole trace, or with fresh prompts one of its steps."""

    trace: Trace
    parts: Parts
    shown: str  # by the world, before the first turn


def samples_of(trace: Trace, dialogue: Dialogue) -> list[TrainingSample]:
    """Return what the cold start learns from in a trace, as a rollout would have it."""
    if dialogue.prompt == "growing":
        shown = shown_text((), trace.seen[0], dialogue) if trace.seen else ""
        return [TrainingSample(trace, trace.parts, shown)]
    turns = [text for text, is_turn in trace.parts if is_turn]
    done = zip(turns, trace.acts, trace.seen[1:], strict=False)
    past = [Exchange(NO_TOKENS, turn, act, after) for turn, act, after in done]
    return [
        TrainingSample(
            trace, [(turn, True)], shown_text(past[:number], trace.seen[number], dialogue)
        )
        for number, turn in enumerate(turns)
    ]


def trace_table(samples: Sequence[TrainingSample], dialect: Dialect) -> pa.Table:
    """Return a row a sample, with its tokens and a mask of those that the agent wrote. [T]"""
    rows = []
    for sample in samples:
        question = sample.trace.question
        tokens, mask = dialect.trace(question, sample.parts, sample.shown)
        rows.append(
            {
                "question_id": question.id,
                "split": "train",
                "kind": question.kind,
                "flaw": sample.trace.flaw,
                "text": "".join(text for text, _ in sample.parts),
                "tokens": tokens,
                "trained": mask,
            }
        )
    return pa.Table.from_pylist(rows, schema=trace_tables.TRACES)

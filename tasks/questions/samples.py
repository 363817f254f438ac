"""What the cold start learns from in a trace: prompts and turns as a rollout would have them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from params.schema.agent import Dialogue
from tasks.dialects.contract import Dialect, Exchange, contexts_of
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
    past = [Exchange(NO_TOKENS, turn, (act,), (after,)) for turn, act, after in done]
    return [
        TrainingSample(
            trace, [(turn, True)], shown_text(past[:number], trace.seen[number], dialogue)
        )
        for number, turn in enumerate(turns)
    ]


@dataclass(frozen=True)
class TraceTable:
    """What the cold start learns from, a row a context, and the sample that each row is of.

    A sample has several rows where the dialect writes the dialogue anew after a turn.
    """

    table: pa.Table  # trace_tables.TRACES; the text of a row is that of its whole sample
    samples: list[TrainingSample]

    @property
    def begins(self) -> list[bool]:
        """Return whether a row is the first one of its sample."""
        before = [None, *self.samples]
        return [now is not then for now, then in zip(self.samples, before, strict=False)]

    @property
    def longest(self) -> list[int]:
        """Return the tokens of each sample's longest context, in the order of the samples."""
        longest: list[int] = []
        lengths = pc.list_value_length(self.table["tokens"]).to_pylist()
        for length, begins in zip(lengths, self.begins, strict=True):
            if begins:
                longest.append(0)
            longest[-1] = max(length, longest[-1])
        return longest

    @property
    def longest_turns(self) -> list[int]:
        """Return the tokens of each sample's longest turn, in the order of the samples."""
        longest: list[int] = []
        masks = self.table["trained"].to_pylist()
        for mask, begins in zip(masks, self.begins, strict=True):
            if begins:
                longest.append(0)
            edges = np.flatnonzero(np.diff(np.array([False, *mask, False], np.int8)))
            longest[-1] = max([longest[-1], *(edges[1::2] - edges[::2]).tolist()])
        return longest

    def without(self, traces: Collection[int]) -> TraceTable:
        """Return the rows of all traces but these, each given by its ``id``."""
        stays = [id(sample.trace) not in traces for sample in self.samples]
        rows = self.table.filter(pa.array(stays, pa.bool_()))
        return TraceTable(rows, [*compress(self.samples, stays)])


def trace_table(samples: Sequence[TrainingSample], dialect: Dialect) -> TraceTable:
    """Tokenise the samples; a row has a mask of the tokens that the agent wrote. [T]"""
    rows, owners = [], []
    for sample in samples:
        question = sample.trace.question
        for tokens, mask in contexts_of(dialect, question, sample.parts, sample.shown):
            owners.append(sample)
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
    return TraceTable(pa.Table.from_pylist(rows, schema=trace_tables.TRACES), owners)

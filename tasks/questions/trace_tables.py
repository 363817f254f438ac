"""The tables of SFT traces, and of what was left out and why."""

from __future__ import annotations

import pyarrow as pa

TRACES = pa.schema(
    {
        "question_id": pa.string(),
        "split": pa.string(),
        "kind": pa.string(),
        "flaw": pa.string(),
        "text": pa.string(),
        "tokens": pa.list_(pa.int32()),
        "trained": pa.list_(pa.bool_()),
    }
)
DROPPED = pa.schema({"question_id": pa.string(), "reason": pa.string(), "detail": pa.string()})

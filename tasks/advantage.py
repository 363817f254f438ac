"""advantage: credit for every leaf from the rewards of its group."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from prefect import task

from tasks import ledger
from tasks.algorithm import Row, assemble
from tasks.ledger import Artifact, Step
from tasks.trajectory import read_rows, write_table

TABLE = pa.schema({"question": pa.string(), "leaf": pa.int32(), "advantage": pa.float64()})


@task(**ledger.TASK_OPTIONS)
@ledger.recorded
def advantage(step: Step, folder: Path, *, rewards: Artifact, row: Row) -> Mapping[str, Any]:
    """Estimate the advantage of every leaf; artifact ``advantages``, a row a leaf."""
    began = time.perf_counter()
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in read_rows(Path(rewards.path)):
        groups.setdefault(entry["question"], []).append(entry)
    estimator = assemble(row).estimator
    rows = [
        {"question": question, "leaf": entry["leaf"], "advantage": float(value)}
        for question, group in groups.items()
        for entry, value in zip(group, estimator(_rewards(group)), strict=True)
    ]
    write_table(pa.Table.from_pylist(rows, schema=TABLE), folder / "advantages.parquet")
    spread = float(np.std([entry["advantage"] for entry in rows]))
    return {
        "metrics": {"advantage_spread": spread},
        "seconds": {"advantage": time.perf_counter() - began},
    }


def _rewards(group: list[dict[str, Any]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([entry["reward"] for entry in group], np.float64)

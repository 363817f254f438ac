"""Prefect's cache asks the ledger: a cached task run is a sub-step that the ledger holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.ledger.artifacts import ROOT
from tasks.ledger.substeps import find


def cache_key(context: Any, arguments: dict[str, Any]) -> str:
    """Prefect's cache key of a sub-step: its place in the ledger.

    A result that Prefect kept counts only while the ledger's own record is whole.
    """
    place: Path = context.task.fn.place(**arguments)
    key = str(place.relative_to(ROOT))
    if not find(place):
        (RESULTS / key).unlink(missing_ok=True)
    return key


RESULTS = ROOT / "prefect"
TASK_OPTIONS: dict[str, Any] = {
    "cache_key_fn": cache_key,
    "persist_result": True,
    "result_storage": RESULTS.absolute(),
    "result_serializer": "json",
}

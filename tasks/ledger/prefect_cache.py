"""Connect Prefect's cache to the ledger: a cached task run is a sub-step that the ledger has."""

from __future__ import annotations

from typing import Any

from tasks.ledger.artifacts import ROOT

RESULTS = (ROOT / "prefect").absolute()  # Prefect wants it absolute: that of the import


def cache_key(context: Any, arguments: dict[str, Any]) -> str:
    """Return Prefect's cache key of a sub-step: its path in the ledger.

    Without a whole record in the ledger, the result that Prefect stored is removed.
    """
    step = arguments["step"]
    place = step.place(context.task.fn, arguments["inputs"])
    key = str(place.relative_to(ROOT))
    if not step.ledger.find(place):
        (RESULTS / key).unlink(missing_ok=True)
    return key


TASK_OPTIONS: dict[str, Any] = {
    "cache_key_fn": cache_key,
    "persist_result": True,
    "result_storage": RESULTS,
    "result_serializer": "json",
}

"""Connect Prefect's cache to the ledger: a cached task run is a sub-step that the ledger has.

Prefect's stored result is what its UI and its cache show; it is never believed. It is written anew
from the ledger's record before Prefect reads it.
"""

from __future__ import annotations

import json
from typing import Any

from tasks.ledger.artifacts import ROOT, Record, remove

RESULTS = (ROOT / "prefect").absolute()  # Prefect wants it absolute: that of the import


def cache_key(context: Any, arguments: dict[str, Any]) -> str:
    """Return Prefect's cache key of a sub-step: its path in the ledger.

    The result that Prefect stored is replaced by the ledger's record; without one, it is removed.
    """
    step = arguments["step"]
    place = step.place(context.task.fn, arguments["inputs"])
    key = str(place.relative_to(ROOT))
    found = step.ledger.find(place)
    remove(RESULTS / key)
    if found:
        _store(key, found)
    return key


def _store(key: str, record: Record) -> None:
    """Write a record as a result of Prefect, which reads it as JSON and nothing else.

    Its default decoder makes objects of the classes that a text names.
    """
    serializer = {"type": "json", "object_encoder": None, "object_decoder": None}
    metadata = {"storage_key": str(RESULTS / key), "serializer": serializer}
    file = RESULTS / key
    partial = file.with_name(f".{file.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(json.dumps({"metadata": metadata, "result": json.dumps(record)}))
    partial.replace(file)


TASK_OPTIONS: dict[str, Any] = {
    "cache_key_fn": cache_key,
    "cache_result_in_memory": False,  # a copy in memory would be read before the stored one
    "persist_result": True,
    "result_storage": RESULTS,
    "result_serializer": "json",
}

"""Say what a run changes against the run of its recipe before it."""

from __future__ import annotations

from dataclasses import dataclass

from flows.tracking import store
from flows.tracking.run import COMMIT_TAG

MISSING = "—"  # the value of a key that a recipe does not have


@dataclass(frozen=True)
class RunBefore:
    """The run before, and what differs: key -> its value there, and here."""

    id: str
    name: str
    changed: dict[str, tuple[str, str]]


def of_run(recipe: str, run: str | None) -> RunBefore | None:
    """Return the run of a recipe before ``run``, an id in MLflow; None where there is none.

    It is the newest one that began earlier, however it ended. Raises ConnectionError where the
    store cannot be read.
    """
    runs = [
        tags
        for tags in store.runs_tagged("recipe", recipe)
        if tags.get(store.KIND_TAG) == store.PIPELINE
    ]
    ids = [tags["id"] for tags in runs]
    if run not in ids[1:]:
        return None
    place = ids.index(run)
    before, now = runs[place - 1], runs[place]
    values = [store.params_of(tags["id"]) | _code(tags) for tags in (before, now)]
    changed = {
        key: (values[0].get(key, MISSING), values[1].get(key, MISSING))
        for key in sorted({*values[0], *values[1]})
        if values[0].get(key) != values[1].get(key)
    }
    return RunBefore(before["id"], before["name"], changed)


def _code(tags: dict[str, str]) -> dict[str, str]:
    return {"commit": tags[COMMIT_TAG][:12]} if tags.get(COMMIT_TAG) else {}

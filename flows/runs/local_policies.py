"""Policies in folders, which DVC does not watch: whether they are still what a stage has read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

from params.run_folders import RunFolders
from tasks.policy import local_policy, teacher

READERS = ("prepare", "champion")  # the stages that read such a folder
NONE = "null"  # what a record has for an input that was none


def changed(recipe: str, root: Path = Path()) -> dict[str, list[str]]:
    """Return a line for each folder that holds another policy than a stage has read, by stage.

    Stages that have not run are not there: DVC runs them.
    """
    folders = RunFolders(recipe)
    with chdir(root):
        records = folders.records("prepare")
        noted = records.read_text() if records.is_file() else ""
        found = {
            f"prepare@{recipe}": list(_differing(_read_by_prepare(recipe, noted))),
            f"champion@{recipe}": list(_differing(_read_as_teacher(recipe, folders.teacher))),
        }
    return {stage: lines for stage, lines in found.items() if lines}


def same(recipe: str, noted: str) -> bool:
    """Return whether the policies here are those of another run, given its records of prepare."""
    return not list(_differing(_read_by_prepare(recipe, noted)))


def _read_by_prepare(recipe: str, records: str) -> Iterator[tuple[object, Any]]:
    """Yield each policy that prepare reads, and the digest that it had, None where it had none."""
    digests: dict[str, Any] = {}
    for line in records.splitlines():
        with suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            digests |= {f"{record['verb']} {k}": v for k, v in record["inputs"].items()}
    first, expert = digests.get("prepare policy"), digests.get("select_traces teacher")
    if {first, expert} <= {None, NONE}:
        return
    from tasks import recipes  # with all rooms that recipes name, which not every call needs

    prepare = recipes.load(recipe, Path("params")).prepare
    yield prepare.policy, first
    yield getattr(prepare.expert, "policy", None), expert


def _read_as_teacher(recipe: str, folder: Path) -> Iterator[tuple[object, Any]]:
    """Yield the folder of the recipe's teacher, and the digest that it had."""
    with suppress(OSError, ValueError, AttributeError):
        noted = json.loads((folder / teacher.RECORD).read_text()).get(teacher.SOURCE)
        if noted:
            from tasks import recipes

            yield recipes.load(recipe, Path("params")).teacher, noted


def _differing(policies: Iterable[tuple[object, Any]]) -> Iterator[str]:
    """Yield a line for each policy whose folder has another digest than was noted."""
    for policy, noted in policies:
        if isinstance(noted, str) and noted != NONE:
            now = local_policy.at(policy)  # reads all of its weights
            if now and now.digest != noted:
                yield f"the policy in {now.path} has changed"

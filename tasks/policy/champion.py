"""Read and write the champion's folder, ``models/<recipe>/champion``.

A candidate has to beat the champion. The folder has ``champion.json`` (version, commit and digest;
a null version if there is no champion) and the champion's files in ``policy``, an ordinary
transformers folder. The stage ``champion`` writes it from the recipe, so a commit records which
champion its run was compared with.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from params.schema.champion import Champion
from tasks.ledger.artifacts import Artifact

NO_CHAMPION = {"version": None}


def write(folder: Path, pinned: Champion | None, restore: Callable[[str, Path], None]) -> None:
    """Replace ``folder``; ``restore(digest, target)`` brings back the files of a policy."""
    record = pinned.model_dump() if pinned else NO_CHAMPION
    with written(folder, "champion.json", record) as partial:
        if pinned:
            restore(pinned.digest, partial / "policy")


@contextmanager
def written(folder: Path, name: str, record: Any) -> Iterator[Path]:
    """Yield a folder to put files into, which then replaces ``folder``; write a record beside."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    (partial / name).write_text(json.dumps(record, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def read(folder: Path) -> dict[str, Any] | None:
    """Return version, commit and digest of the champion in ``folder``; None if there is none.

    Raises ValueError where the stage champion has not run.
    """
    file = folder / "champion.json"
    if not file.exists():
        raise ValueError(f"{file} does not exist: run the stage that makes it, champion, first")
    record: dict[str, Any] = json.loads(file.read_text())
    return record if record["version"] else None


def policy(folder: Path) -> Artifact | None:
    """Return the files of the champion in ``folder``; None if there is none."""
    return Artifact.at(folder / "policy") if read(folder) else None

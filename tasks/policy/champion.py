"""The folder of the champion, ``models/<recipe>/champion``: what a candidate has to beat.

It holds ``champion.json`` (version, commit and digest; a null version where there is none) and, of
a champion, its files in ``policy``, an ordinary transformers folder. The stage ``champion`` writes
it from the recipe, so that a commit says which champion its run was compared with.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from params.schema.champion import Champion
from tasks.ledger.artifacts import Artifact

NOBODY = {"version": None}


def write(folder: Path, pinned: Champion | None, restore: Callable[[str, Path], None]) -> None:
    """Fill ``folder`` anew; ``restore(digest, target)`` brings the files of a policy back."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if pinned:
        restore(pinned.digest, partial / "policy")
    said = pinned.model_dump() if pinned else NOBODY
    (partial / "champion.json").write_text(json.dumps(said, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def read(folder: Path) -> dict[str, Any] | None:
    """Version, commit and digest of the champion in ``folder``; None where there is none."""
    file = folder / "champion.json"
    if not file.exists():
        raise ValueError(f"{file} does not exist: run the stage that makes it, champion, first")
    said: dict[str, Any] = json.loads(file.read_text())
    return said if said["version"] else None


def policy(folder: Path) -> Artifact | None:
    """The files of the champion in ``folder``; None where there is none."""
    return Artifact.at(folder / "policy") if read(folder) else None

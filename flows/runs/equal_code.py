"""Take over stages whose code differs only in what does not run: docstrings, comments, layout.

DVC compares files, the ledger compares parsed source (tasks/ledger/keys.py). After an edit of a
docstring DVC would start each stage that depends on the file, and every sub-step would be found.
So a finished run keeps a digest of the parsed source of each stage's dependencies. Where they are
the same, and nothing else of the stage has changed, ``dvc commit`` writes the new files to dvc.lock
and the stage does not start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.host import files
from flows.runs.dvc_command import open_repository
from flows.runs.pipeline import changes_of, locked
from flows.runs.stage_reasons import is_code
from tasks.ledger.keys import code_digest

FILE = Path(".beamline/code.json")  # stage -> its dependencies in dvc.lock, and digests of code
CHANGED_DEPENDENCIES = "changed deps"  # of DVC's status


def remember(recipe: str) -> None:
    """Keep digests of the code that the stages of a recipe have run with.

    A stage whose files were edited meanwhile is left out: it will start again.
    """
    code_by_stage = {
        name: {"deps": _code(entry), "files": _digests(_code(entry))}
        for name, entry in locked().items()
        if name.endswith(f"@{recipe}")
    }
    with open_repository() as repository:
        changed = changes_of(recipe, repository)
    _write(_read() | {name: entry for name, entry in code_by_stage.items() if name not in changed})


def take_over(recipe: str) -> list[str]:
    """Renew dvc.lock for the stages whose code runs as before; return their names."""
    known = {name: entry for name, entry in _read().items() if name.endswith(f"@{recipe}")}
    entries = locked()
    known = {
        name: entry
        for name, entry in known.items()
        if name in entries and entry["deps"] == _code(entries[name])
    }
    if not known:
        return []
    with open_repository() as repository:
        changes = changes_of(recipe, repository)
        equal = [name for name in known if _is_equal(changes.get(name), known[name])]
        for name in equal:
            repository.commit(name, force=True)
    renewed = {name: {**known[name], "deps": _code(locked()[name])} for name in equal}
    _write(_read() | renewed)
    return equal


def _read() -> dict[str, Any]:
    try:
        return dict(json.loads(FILE.read_text()))
    except (OSError, ValueError):  # of no run yet, or damaged: stages start
        return {}


def _write(known: Mapping[str, Any]) -> None:
    FILE.parent.mkdir(parents=True, exist_ok=True)
    with files.replaced(FILE) as partial:
        partial.write_text(json.dumps(known))


def _code(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the files and folders of code in an entry of dvc.lock, with their digests."""
    deps = entry.get("deps", [])
    return {dep["path"]: dep.get("md5", "") for dep in deps if is_code(dep["path"])}


def _is_equal(changes: list[Any] | None, before: Mapping[str, Any]) -> bool:
    """Return whether code is all that has changed of a stage, and runs as before."""
    kinds = {kind for one in changes or [{}] for kind in ([one] if isinstance(one, str) else one)}
    if not changes or kinds != {CHANGED_DEPENDENCIES}:
        return False
    paths = {path for one in changes for path in one[CHANGED_DEPENDENCIES]}
    return paths <= set(before["deps"]) and _digests(before["deps"]) == before["files"]


def _digests(paths: Mapping[str, str]) -> dict[str, str]:
    """Return a digest of each file at or below the paths; of Python files that of their code."""
    digests = {
        file.as_posix(): _digest(file)
        for path in map(Path, paths)
        for file in ([path] if path.is_file() else sorted(path.rglob("*")))
        if file.is_file() and file.suffix != ".pyc"
    }
    return dict(sorted(digests.items()))


def _digest(file: Path) -> str:
    if file.suffix == ".py":
        try:
            return code_digest(file.absolute())
        except (SyntaxError, ValueError):  # the stage will say so
            pass
    return hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()

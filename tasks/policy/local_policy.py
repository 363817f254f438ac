"""Policies that a recipe names by a folder here: what is in it, which no commit says."""

from __future__ import annotations

from pathlib import Path

from tasks.ledger.artifacts import Artifact


def at(policy: object) -> Artifact | None:
    """Return the folder of a policy, or its GGUF file in it, with its digest as it is now.

    None for a policy of the hub or of a package, and for one that a recipe makes.
    """
    name, gguf = getattr(policy, "name", None), getattr(policy, "gguf", None)
    if not isinstance(name, str) or getattr(policy, "revision", None) is not None:
        return None
    path = Path(name, gguf) if gguf else Path(name)
    return Artifact.at(path) if Path(name).is_dir() and path.exists() else None

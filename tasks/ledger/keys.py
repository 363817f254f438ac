"""The key of a sub-step: a digest of everything that decides its outcome."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tasks.ledger.artifacts import Artifact, Step

PROJECT = Path(__file__).resolve().parents[2]
ROOMS = ("flows", "tasks", "params")
KEY_LETTERS = 16


def stage_key(recipe: BaseModel, *inputs: Artifact) -> str:
    """A key of a whole stage: its recipe and the digests of what it reads."""
    text = "/".join([recipe.model_dump_json(), *(entry.digest for entry in inputs)])
    return hashlib.blake2b(text.encode()).hexdigest()[:KEY_LETTERS]


def key_of(made_from: Mapping[str, str]) -> str:
    text = json.dumps(made_from, sort_keys=True)
    return hashlib.blake2b(text.encode()).hexdigest()[:KEY_LETTERS]


def identity(value: Any) -> str | None:
    """What an argument contributes to a key; None for one that can't change the outcome."""
    if isinstance(value, Artifact):
        return value.digest
    if isinstance(value, list):
        return json.dumps([identity(entry) for entry in value])
    if isinstance(value, dict):
        return json.dumps({name: identity(entry) for name, entry in value.items()}, sort_keys=True)
    if isinstance(value, Step):
        return json.dumps({"iteration": value.iteration, "seed": value.seed})
    if isinstance(value, BaseModel):
        return json.dumps(value.model_dump(mode="json"), sort_keys=True)
    if value is None or isinstance(value, str | int | float | bool):
        return json.dumps(value)
    if callable(value):  # a tool or a progress bar
        return None
    raise TypeError(f"{value!r} can't be part of a key: pass an artifact, a section or a number")


# ---------------------------------------------------------------- source


@functools.cache
def source_digests(module: Path) -> dict[str, str]:
    """Digests of a module's source and of all project files that it imports, directly or not."""
    return {
        str(file.relative_to(PROJECT)): hashlib.blake2b(
            file.read_bytes(), digest_size=8
        ).hexdigest()
        for file in import_closure(module)
    }


def source_digest(module: Path) -> str:
    """One digest of them all."""
    text = json.dumps(source_digests(module), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def import_closure(module: Path) -> list[Path]:
    """The project files that ``module`` is made of: itself and what it imports, sorted."""
    found: set[Path] = set()
    waiting = [module.resolve()]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += [path for name in imports(file) if (path := _project_file(name))]
    return sorted(found)


def imports(file: Path) -> Iterable[str]:
    """Dotted names of the modules that a file may import; names from packages included."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _project_file(name: str) -> Path | None:
    if name.split(".")[0] not in ROOMS:
        return None
    path = PROJECT.joinpath(*name.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None

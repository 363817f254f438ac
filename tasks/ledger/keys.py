"""The key of a sub-step: a digest of everything that decides its outcome."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tasks.ledger import parsed
from tasks.ledger.artifacts import Artifact

PROJECT = Path(__file__).resolve().parents[2]
ROOMS = ("flows", "tasks", "params", "beamline", "own")
KEY_LETTERS = 16
OWN = "tasks/ledger"
DESCRIBED = ("tasks/tools", "tasks/environments")  # folders whose docstrings an agent may read


def stage_key(recipe: BaseModel, *inputs: Artifact) -> str:
    """Return the key of a whole stage: its recipe, and the digests of its inputs."""
    return _short("/".join([recipe.model_dump_json(), *(entry.digest for entry in inputs)]))


def key_of(identities: Mapping[str, str]) -> str:
    """Return the key of a sub-step with these inputs. Hexadecimal, 16 letters."""
    return _short(json.dumps(identities, sort_keys=True))


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode()).hexdigest()[:KEY_LETTERS]


def identities(inputs: Any, module: Path) -> dict[str, str]:
    """Return what decides the result of a verb in ``module``: name -> identity.

    ``inputs`` is the verb's frozen dataclass. Each field counts, and so does the verb's source.
    """
    named = {entry.name: identity(getattr(inputs, entry.name)) for entry in fields(inputs)}
    return {**dict(sorted(named.items())), "source": source_digest(module)}


def identity(value: Any) -> str:
    """Return what an input contributes to a key, as text.

    Raises TypeError for a value without content to digest, such as a function or a path.
    """
    if isinstance(value, Artifact):
        return value.digest
    if isinstance(value, list | tuple):
        return json.dumps([identity(entry) for entry in value])
    if isinstance(value, Mapping):
        return json.dumps({name: identity(entry) for name, entry in value.items()}, sort_keys=True)
    if isinstance(value, BaseModel):
        return json.dumps(value.model_dump(mode="json"), sort_keys=True)
    if value is None or isinstance(value, str | int | float | bool):
        return json.dumps(value)
    raise TypeError(
        f"{value!r} can't be part of a key: pass an artifact, a section, a text or a number"
    )


# ---------------------------------------------------------------- source


@functools.cache
def source_digests(module: Path) -> dict[str, str]:
    """Digest the source of a module and of all project files that it imports, directly or not.

    Returns path in the project -> digest of the parsed source. Comments, line breaks and docstrings
    do not count, except for docstrings in the folders DESCRIBED. The ledger's own files are left
    out: they store what verbs write and do not decide it.
    """
    return {
        str(file.relative_to(PROJECT)): code_digest(file)
        for file in import_closure(module)
        if not file.is_relative_to(PROJECT / OWN)
    }


def source_digest(module: Path) -> str:
    """Return a single digest of all of ``source_digests``."""
    return sources_digest(source_digests(module))


def sources_digest(digests: Mapping[str, str]) -> str:
    """Return a single digest of what ``source_digests`` returns."""
    text = json.dumps(digests, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def code_digest(file: Path) -> str:
    """Digest the parsed source of a file, without what does not run. Hexadecimal, 16 letters."""
    return _parsed(file)[1]


def _parsed(file: Path) -> parsed.Parsed:
    """Return the dotted names that a file may import, and the digest of its code."""
    described = any(file.is_relative_to(PROJECT / room) for room in DESCRIBED)
    try:
        return _parsed_source(file.read_text(), described)
    except ValueError as error:
        raise ValueError(f"{file}, {error}") from None


@functools.cache  # many modules import the same files
def _parsed_source(source: str, described: bool) -> parsed.Parsed:
    key = parsed.key_of(source, described)
    if (result := parsed.find(key, _parser())) is None:
        result = _parse(source, described)
        parsed.keep(key, _parser(), result)
    return result


@functools.cache
def _parser() -> str:
    """Return a digest of this file: other code may parse otherwise."""
    return hashlib.blake2b(Path(__file__).read_bytes(), digest_size=8).hexdigest()


def _parse(source: str, described: bool) -> parsed.Parsed:
    tree: ast.AST = ast.parse(source)
    names = tuple(_imported_names(tree))
    text = ast.dump(tree if described else without_docstrings(tree))  # without line numbers
    return names, hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def without_docstrings(tree: ast.AST) -> ast.AST:
    """Return parsed source with the docstrings of its definitions taken out, in place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                del node.body[0]
    return tree


def import_closure(module: Path) -> list[Path]:
    """Return the module's file and all project files that it imports, directly or not, sorted."""
    files: set[Path] = set()
    waiting = [module.resolve()]
    while waiting:
        file = waiting.pop()
        if file not in files:
            files.add(file)
            waiting += imported_files(file)
    return sorted(files)


def imported_files(file: Path) -> list[Path]:
    """Return the project files that the imports in ``file`` run, ``__init__.py`` included."""
    about = file.stat()
    return list(_imported_files(file, (about.st_mtime_ns, about.st_size)))


@functools.cache  # many modules import the same files
def _imported_files(file: Path, version: tuple[int, int]) -> tuple[Path, ...]:
    return tuple(path for name in imports(file) for path in _project_files(name))


def imports(file: Path) -> Iterable[str]:
    """Return the dotted names that a file may import; each name after ``from`` may be a module.

    Raises ValueError for a relative import, which has no dotted name.
    """
    return _parsed(file)[0]


def _imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level or not node.module:
                raise ValueError(
                    f"line {node.lineno}, has a relative import, which keys do not see: "
                    "write the full name of the module"
                )
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _project_files(name: str) -> list[Path]:
    """Return the files that importing a dotted name runs: its packages' and its own.

    Empty files decide nothing and are left out.
    """
    parts = name.split(".")
    if parts[0] not in ROOMS:
        return []
    paths = [PROJECT.joinpath(*parts[: length + 1]) for length in range(len(parts))]
    files = [file for path in paths for file in (path / "__init__.py", path.with_suffix(".py"))]
    return [file for file in files if file.is_file() and file.stat().st_size]

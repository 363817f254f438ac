"""Digest functions of the project with all that they use, instead of whole files.

So an edit of a command's help, or a move of a function to another file, leaves a key as it is, and
an edit of what decides a result does not.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

from tasks.ledger.keys import PROJECT, without_docstrings


@functools.cache  # source does not change while a process runs
def function_digests(
    file: Path, name: str, folder: str, without: tuple[str, ...] = ()
) -> dict[str, str]:
    """Digest a function, class or constant of ``file`` and all that it uses, directly or not.

    Uses are followed in ``folder`` of the project, such as "flows", but not in the folders or files
    ``without``. Returns name -> digest of the parsed source, which comments, line breaks,
    docstrings and the place of a definition do not change. A name that several files define has a
    digest of them all.
    """
    found: dict[tuple[Path, str], str] = {}
    waiting = [(file.resolve(), name)]
    while waiting:
        place = waiting.pop()
        definition = _definitions(place[0]).get(place[1])
        if place in found or definition is None:
            continue
        text = ast.dump(without_docstrings(definition))
        found[place] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        waiting += [
            (module, used)
            for module, used in _used(place[0], definition)
            if _is_below(module, folder) and not any(_is_below(module, out) for out in without)
        ]
    together: dict[str, list[str]] = {}
    for (_, defined), digest in found.items():
        together.setdefault(defined, []).append(digest)
    return {defined: " ".join(sorted(digests)) for defined, digests in sorted(together.items())}


def _is_below(file: Path, place: str) -> bool:
    return file.is_relative_to(_root(file) / place)


@functools.cache
def _root(file: Path) -> Path:
    """Return the folder of the project that a file belongs to; a copy has one of its own."""
    return next((above for above in file.parents if (above / "pyproject.toml").is_file()), PROJECT)


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def _definitions(file: Path) -> dict[str, ast.stmt]:
    """Return what a module defines by name: functions, classes and assigned names."""
    found: dict[str, ast.stmt] = {}
    for node in _parsed(file).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, ast.Assign):
            names = [one for target in node.targets for one in ast.walk(target)]
            found |= {one.id: node for one in names if isinstance(one, ast.Name)}
    return found


@functools.cache
def _imported(file: Path) -> dict[str, tuple[Path, str | None]]:
    """Return the names that a module imports from the project: their file, and name there.

    The name is None where the import is of the module itself.
    """
    found: dict[str, tuple[Path, str | None]] = {}
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.ImportFrom) and node.module:
            folder = _root(file).joinpath(*node.module.split("."))
            for alias in node.names:
                module, here = folder / f"{alias.name}.py", folder.with_suffix(".py")
                if module.is_file():
                    found[alias.asname or alias.name] = (module, None)
                elif here.is_file():
                    found[alias.asname or alias.name] = (here, alias.name)
    return found


def _used(file: Path, definition: ast.stmt) -> Iterator[tuple[Path, str]]:
    """Yield file and name of each definition of the project that this one names."""
    imported = _imported(file)
    for node in ast.walk(definition):
        if isinstance(node, ast.Name):
            module, name = imported.get(node.id, (file, node.id))
            if name is not None:
                yield module.resolve(), name
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module, name = imported.get(node.value.id, (file, ""))
            if name is None:
                yield module.resolve(), node.attr

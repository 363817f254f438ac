"""Find what a recipe names: a file of a room by its name, or what a user's file holds by its path.

``python`` in the section ``tools`` is the file tasks/tools/python.py, which holds the object TOOL;
``own/weather.py:weather`` is what the user's file own/weather.py holds under the name ``weather``.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from params import suggestions
from tasks.extensions import guarded_import
from tasks.ledger import keys

OWN = Path("own")  # the user's folder; DVC watches it, and a run commits it
SEARCHED = 2**20  # bytes of a file in which names of other files are looked for, at most
ROOMS = {  # section of a recipe -> the folder of its files, and the object that each file holds
    "tools": ("tasks/tools", "TOOL"),
    "environment": ("tasks/environments", "ENVIRONMENT"),
    "dialect": ("tasks/dialects", "DIALECT"),
    "scorer": ("tasks/scorers", "SCORER"),
    "expert": ("tasks/questions", "EXPERT"),
    "reward": ("tasks/rewards", "PART"),
}


@dataclass(frozen=True)
class Named:
    """What a name stands for."""

    name: str
    held: Any  # the object in the file
    reference: str  # where it is: "<file>:<name of the object>"
    sources: str  # a digest of the file, of the project's files that it imports, and of own data


def names(room: str) -> list[str]:
    """Return the names of the files in a room that hold its object, sorted."""
    folder, attribute = ROOMS[room]
    files = (keys.PROJECT / folder).glob("*.py")
    return sorted(file.stem for file in files if f"\n{attribute} = " in file.read_text())


def find(room: str, name: str) -> Named:
    """Return what ``name`` stands for in a room.

    Raises ValueError with name, reason and remedy: for an unknown name, a path outside ``own/``, a
    file that is missing, that cannot be imported or that lacks the object.
    """
    if ".py" in name:
        return _own(name)
    folder, attribute = ROOMS[room]
    if name not in names(room):
        raise ValueError(
            f"nothing in {folder}/ is called '{name}'{suggestions.meant(name, names(room))}: "
            f"choose one of {', '.join(names(room))}, or name a file of yours, such as "
            "own/mine.py:Mine"
        )
    file = keys.PROJECT / folder / f"{name}.py"
    held = getattr(importlib.import_module(f"{folder.replace('/', '.')}.{name}"), attribute)
    return Named(name, held, f"{folder}/{name}.py:{attribute}", keys.source_digest(file))


def _own(name: str) -> Named:
    path, _, attribute = name.partition(":")
    file = Path(path)
    if file.is_absolute() or ".." in file.parts or not file.is_relative_to(OWN):
        raise ValueError(
            f"{path} is outside the folder {OWN}/, so a run would not commit it: move it there"
        )
    if not attribute.isidentifier():
        raise ValueError(f"'{name}' names no function or class: write {path}:<its name>")
    if not file.is_file():
        there = [str(other) for other in OWN.rglob("*.py")]
        raise ValueError(
            f"{path} does not exist{suggestions.meant(path, there)}: put your file there, or "
            "correct the path"
        )
    module = _imported(file)
    if not hasattr(module, attribute):
        meant = suggestions.meant(attribute, _public(module))
        raise ValueError(
            f"{path} holds no '{attribute}'{meant}: it has "
            f"{', '.join(_public(module)) or 'nothing of its own'}"
        )
    return Named(name, getattr(module, attribute), name, own_digest(file))


def _imported(file: Path) -> Any:
    """Import a user's file by its dotted name, so that it may import its neighbours."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        sources = [path for path in OWN.rglob("*.py") if path.is_file()]
        return guarded_import.import_file(file, _digest(sources))
    except guarded_import.UnfinishedImportError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = [f for f in traceback.extract_tb(error.__traceback__) if OWN.name in f.filename]
        line = f", line {frames[-1].lineno}" if frames else ""
        raise ValueError(
            f"{file}{line}: cannot be imported: {type(error).__name__}: {error}"
        ) from error


def _public(module: Any) -> list[str]:
    members = (name for name, held in vars(module).items() if _defined_in(held, module.__name__))
    return sorted(name for name in members if not name.startswith("_"))


def _defined_in(held: Any, module: str) -> bool:
    return getattr(held, "__module__", None) == module


def own_digest(file: Path) -> str:
    """Digest a user's file, what it imports, and what else of ``own/`` it may read or start.

    Docstrings count, because an agent may read them.
    """
    imported = {path for path in keys.import_closure(file) if path.suffix == ".py"}
    return _digest(_with_mentioned(imported | _data(), set()))


def digest_of_mentioned(settings: Mapping[str, Any]) -> str:
    """Digest what settings may start or read in ``own/``, such as a server's command; "" for none.

    Raises nothing for a file that is missing: whoever starts it says so.
    """
    text = json.dumps(settings, default=str, ensure_ascii=False)
    if not re.search(rf"\b{OWN}/", text):
        return ""
    return _digest(_with_mentioned(_data(), _words(text)))


def _data() -> set[Path]:
    """Return the files of ``own/`` that are no code of Python."""
    files = {path for path in OWN.rglob("*") if path.suffix not in (".py", ".pyc")}
    return {path.resolve() for path in files if path.is_file()} - {(OWN / "README.md").resolve()}


def _with_mentioned(files: set[Path], words: set[str]) -> set[Path]:
    """Return files with those of ``own/`` that they, or ``words``, name without importing them.

    A file that is started or loaded by its name is found by it: a name that stands for something
    else makes more files count than have to.
    """
    files = {path.resolve() for path in files}
    others = {path.resolve() for path in OWN.rglob("*.py") if path.is_file()} - files
    searched: set[Path] = set()
    while True:
        for path in files - searched:
            if path.stat().st_size <= SEARCHED:
                words |= _words(path.read_text(errors="replace"))
        searched |= files
        found = {path for path in others if _names_of(path) & words}
        if not found:
            return files
        for path in found:
            files |= {path} | _closure(path)
        others -= files


def _names_of(file: Path) -> set[str]:
    """Return the names by which a file of ``own/`` can be meant: its own, its folders'."""
    below = file.relative_to(OWN.resolve())
    return {below.stem, *below.parts[:-1]}


def _closure(file: Path) -> set[Path]:
    """Return what a file imports; none for one that only another Python can read."""
    try:
        return {path.resolve() for path in keys.import_closure(file) if path.suffix == ".py"}
    except (ValueError, SyntaxError):
        return set()


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _digest(files: Iterable[Path]) -> str:
    """Digest contents, and the places that files have in this folder or in the project's."""
    digest = hashlib.blake2b(digest_size=16)
    for name, file in sorted((_place(file), file) for file in files):
        digest.update(f"{name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _place(file: Path) -> str:
    for folder in (Path.cwd().resolve(), keys.PROJECT):
        if file.resolve().is_relative_to(folder):
            return file.resolve().relative_to(folder).as_posix()
    return file.name

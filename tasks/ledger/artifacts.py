"""Artifacts: files and folders with a digest of their content."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

ROOT = Path(".beamline/ledger")
DIGEST_BYTES = 16
MAPPED = 2**20  # bytes; files of this size and more are digested by several threads
RECORD = "record.json"
EMPTY_FOLDER = blake3(b"a folder without files").hexdigest(DIGEST_BYTES)  # no digest of a file

Record = dict[str, Any]


@dataclass(frozen=True)
class Artifact:
    """A file or a folder with the digest of its content. Equal digests mean equal content."""

    path: str
    digest: str

    @classmethod
    def at(cls, path: Path) -> Artifact:
        """Return the artifact at ``path`` as it is now. Raises ValueError for a missing path."""
        if not path.exists():
            raise ValueError(f"{path} does not exist: run the stage that makes it first")
        return cls(str(path), digest(path))


def output(record: Record, name: str) -> Artifact:
    """Return the artifact ``name`` that the sub-step of ``record`` made."""
    artifact = record["artifacts"][name]
    return Artifact(artifact["path"], artifact["digest"])


def digest(path: Path) -> str:
    """Digest a file's bytes, or the file names and bytes of a folder. Hexadecimal, 32 letters.

    BLAKE3 digests the parts of a large file in parallel, so the digest of a checkpoint takes a
    fraction of the time to write it. Links are followed: DVC may have linked what a stage reads.
    """
    if path.is_file():
        return _file_digest(path).hexdigest(DIGEST_BYTES)
    if not (files := files_of(path)):
        return EMPTY_FOLDER
    state = blake3()
    for file in files:
        state.update(os.fsencode(f"{file.relative_to(path)}\0") + _file_digest(file).digest())
    return state.hexdigest(DIGEST_BYTES)


def _file_digest(file: Path) -> blake3:
    if file.stat().st_size < MAPPED:
        return blake3(file.read_bytes())
    return blake3(max_threads=blake3.AUTO).update_mmap(file)


def size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    return sum(file.stat().st_size for file in files_of(path))


def files_of(path: Path) -> list[Path]:
    """Return ``path`` if it is a file, or all files below it, sorted."""
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def irregular(path: Path) -> Path | None:
    """Return the first of ``path`` and what is below it that is a link or no file, or None.

    No link is followed. Raises FileNotFoundError where nothing is at ``path``.
    """
    if not stat.S_ISDIR(path.lstat().st_mode):
        return None if stat.S_ISREG(path.lstat().st_mode) else path
    return next(filter(None, map(irregular, sorted(path.iterdir()))), None)


# ---------------------------------------------------------------- records


class PrunedError(RuntimeError):
    """A needed artifact was dropped by ``Ledger.retire``; ``Ledger.revive`` lets it be remade."""


def need(artifact: Artifact) -> None:
    """Raise PrunedError if ``artifact`` was one of the ledger and is missing now.

    Raises ValueError where it is or has a link: the ledger makes none.
    """
    path = Path(artifact.path)
    if not path.is_relative_to(ROOT):
        return
    if not os.path.lexists(path):
        raise PrunedError(f"{artifact.path} has been pruned, and is needed again")
    if odd := irregular(path):
        raise ValueError(f"{odd} is a link or no file: remove {path.parent}, and it is made again")


def _copied(source: Path, target: Path) -> None:
    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)


def publish(
    artifact: Artifact, target: Path, write: Callable[[Path, Path], object] = _copied
) -> None:
    """Copy an artifact to ``target``, whole or not at all. Raises as ``need``.

    ``write(source, target)`` makes the copy; pass one to write something else than a plain copy.
    """
    need(artifact)
    source, partial = Path(artifact.path), target.with_name(f".{target.name}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    remove(partial)
    write(source, partial)
    remove(target)
    partial.rename(target)


def publish_records(records: Sequence[Record], target: Path) -> None:
    """Write what equal runs have in common of ``records`` to ``target``, as JSON lines.

    A line has stage, iteration, verb, key, inputs (name -> identity), artifacts (name -> digest)
    and seed, and if the record has them attempt, questions (ids), cursor and published. It has no
    times, hosts or paths.
    """
    lines = [json.dumps(_repeatable(record)) + "\n" for record in records]
    partial = target.with_name(f".{target.name}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text("".join(lines))
    partial.replace(target)


def _repeatable(record: Record) -> Record:
    step = record["step"]
    digests = {name: artifact["digest"] for name, artifact in record["artifacts"].items()}
    optional: Record = {
        name: record[name]
        for name in ("attempt", "questions", "cursor", "published")
        if name in record
    }
    return {
        "stage": step["stage"],
        "iteration": step["iteration"],
        "verb": record["verb"],
        "key": record["key"],
        "inputs": record["inputs"],
        "artifacts": digests,
        "seed": step["seed"],
        **optional,
    }


def remove(path: Path) -> None:
    """Remove a file, a folder or a link if it exists; what a link leads to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

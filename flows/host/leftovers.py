"""Find what crashes leave in a checkout: partial files, locks, worktrees, other package versions.

Each function takes the root of a checkout and yields findings. What a living process may use is
none, and this is checked once more before anything is removed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

from packaging.version import Version

from flows.host import files, processes
from params.schema.base import SOURCES
from tasks import recipes

LEDGER = Path(".beamline/ledger")
ROOMS = (LEDGER, *map(Path, ("data", "models", "reports", "params/resolved", ".beamline/unsent")))
UNFINISHED = re.compile(r".+\.partial|\..+\.(scratch|fetched)")
MADE_ASIDE = (".beamline/.new-store-*", ".beamline/prefect/tmp*")
WORKTREES = Path(".beamline/runs")
PIN = re.compile(r"([\w.-]+)==([^\s;#]+)")
UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


@dataclass(frozen=True)
class Finding:
    """One leftover: what it is, what clearing it does, and the function that clears it, if any."""

    what: str
    clearing: str
    clear: Callable[[], object] | None


# ---------------------------------------------------------------- temporary names


def half_written(root: Path) -> Iterator[Finding]:
    """Find temporary names that no writer has renamed, and checkpoints of interrupted sub-steps."""
    for path in _unfinished(root):
        if not _is_held(root, path):
            name = path.relative_to(root)
            drop = "removes it; its writer starts again in any case"
            if path.name.endswith(".scratch"):
                whole = path.with_name(path.name.removeprefix(".").removesuffix(".scratch"))
                drop = "removes it: the next call would continue from it, and starts again instead"
                drop = "removes it; its sub-step has finished" if whole.exists() else drop
            size = _readable(sum(_sizes(path)))
            yield Finding(f"half-written: {name} ({size})", drop, partial(_remove, root, path))


def _unfinished(root: Path) -> Iterator[Path]:
    for room in ROOMS:
        for parent, folders, plain in os.walk(root / room):
            for name in sorted(folders + plain):
                if UNFINISHED.fullmatch(name):
                    yield Path(parent, name)
            folders[:] = [
                name
                for name in folders
                if not UNFINISHED.fullmatch(name) and Path(parent, name) != root / SOURCES
            ]
    for pattern in MADE_ASIDE:
        yield from sorted(root.glob(pattern))


def _is_held(root: Path, path: Path) -> bool:
    """Return whether a living run of the checkout may be writing at ``path``."""
    recipes = [file.stem for file in (root / "params").glob("*.yaml")]
    parts = path.relative_to(root).parts
    recipe = parts[2] if path.is_relative_to(root / LEDGER) else parts[1]
    commands = processes.runs(root)
    return any(recipe not in recipes or processes.holds(c, recipe, recipes) for c in commands)


def _remove(root: Path, path: Path) -> None:
    if not _is_held(root, path):
        files.remove(path)


def _sizes(path: Path) -> list[int]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return [file.stat().st_size for file in files]


def _readable(size: float) -> str:
    for unit in UNITS[:-1]:
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.0f} {UNITS[-1]}"


# ---------------------------------------------------------------- locks and worktrees


def git_locks(root: Path) -> Iterator[Finding]:
    """Find lock files of git that no living process can have made."""
    for lock in _locks(_git_folder(root), root):
        if not processes.may_have_made(lock, root):
            name = lock.relative_to(root) if lock.is_relative_to(root) else lock
            yield Finding(
                f"stale lock: {name}, which stops git",
                "removes it",
                partial(_unlock, lock, root),
            )


def _unlock(lock: Path, root: Path) -> None:
    if not processes.may_have_made(lock, root):
        lock.unlink(missing_ok=True)


def _git_folder(root: Path) -> Path:
    """Return ``.git``, or the folder that the file ``.git`` of a linked worktree names."""
    git = root / ".git"
    return root / git.read_text().removeprefix("gitdir:").strip() if git.is_file() else git


def _locks(git: Path, root: Path) -> list[Path]:
    """List lock files of a repository and of its worktrees in the checkout."""
    named = git.glob("worktrees/*/gitdir")
    ours = [file.parent for file in named if Path(file.read_text().strip()).is_relative_to(root)]
    locks = [lock for folder in (git, *ours) for lock in folder.glob("*.lock")]
    return sorted([*locks, *(git / "refs").rglob("*.lock")])


def worktrees(root: Path, remove: Callable[[Path], object]) -> Iterator[Finding]:
    """Find worktrees of unfinished runs that no process works in; ``remove`` removes one.

    The process that works in a worktree holds the lock of the record beside it
    (flows/runs/worktree.py).
    """
    home = root / WORKTREES
    names = {path.stem for path in home.glob("*.json")} | {p.name for p in home.glob("*/")}
    for worktree in (home / name for name in sorted(names)):
        with _locked(worktree) as free:
            if free:
                yield Finding(
                    f"unfinished run: {worktree.relative_to(root)} "
                    f"({_readable(sum(_sizes(worktree)))})",
                    "removes its worktree and its ledger; the same call would continue it",
                    partial(_drop, worktree, remove),
                )


def _drop(worktree: Path, remove: Callable[[Path], object]) -> None:
    with _locked(worktree) as free:
        if free:
            remove(worktree)
            _record(worktree).unlink(missing_ok=True)


@contextmanager
def _locked(worktree: Path) -> Iterator[bool]:
    """Lock the record of a worktree during the block; yield whether no process works there."""
    free = not processes.work_below(worktree)
    if not _record(worktree).exists():
        yield free
        return
    with _record(worktree).open() as record:
        yield files.lock(record) and free


def _record(worktree: Path) -> Path:
    return worktree.with_name(f"{worktree.name}.json")


# ---------------------------------------------------------------- packages and the disk


def pins(root: Path) -> Iterator[Finding]:
    """Find packages whose installed version differs from constraints.txt."""
    file = root / "constraints.txt"
    for line in file.read_text().splitlines() if file.exists() else []:
        if not (pin := PIN.match(line)):
            continue
        name, constraint = pin.groups()
        with suppress(PackageNotFoundError):
            version = Version(installed_version(name))
            if constraint not in (str(version), version.public):
                yield Finding(
                    f"drifted pin: {name} is {version}, constraints.txt says {constraint}",
                    "is left to you: `make` installs what constraints.txt names",
                    None,
                )


def disk(root: Path) -> Iterator[Finding]:
    """Find recipes whose remaining iterations need more space than is free, by their mean."""
    for folder in sorted((root / LEDGER).glob("*/reinforce")):
        sizes: dict[str, int] = defaultdict(int)
        for sub_step in folder.glob("[0-9]*-*"):
            sizes[sub_step.name.partition("-")[0]] += sum(_sizes(sub_step))
        with suppress(ValueError):
            whole = recipes.load(folder.parent.name, root / "params").reinforce.iterations
            mean = sum(sizes.values()) / max(len(sizes), 1)
            need, free = mean * max(0, whole - len(sizes)), shutil.disk_usage(root).free
            if need > free:
                yield Finding(
                    f"full disk ahead: {whole - len(sizes)} iterations of {folder.parent.name} "
                    f"need {_readable(need)}, {_readable(free)} are free",
                    "is left to you: make room, or raise reinforce.keep.weights_every",
                    None,
                )

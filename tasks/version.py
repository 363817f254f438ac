"""Git and DVC: the stages of a recipe, whether they must run, running one, and what came of it.

Everything is relative to the current folder, which is the project's root. DVC is imported where it
is needed, for most of what calls this module does without. Run as a program, it is the ``dvc``
command as ``reproduce`` needs it.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from tasks import ledger

# The one list of project modules that a stage imports and that dvc.yaml still does not name among
# its deps: what they do cannot reach an out.
NOT_DEPENDENCIES = {
    "flows/server.py": "finds or starts the Prefect server",
    "flows/stage.py": "checks the recipe and tells Prefect that the stage runs",
    "tasks/figures.py": "draws what track keeps",
    "tasks/progress.py": "shows how far a stage has come",
    "tasks/spans.py": "words for MLflow what the ledger keeps",
    "tasks/track.py": "writes to MLflow and to nothing else",
    "tasks/version.py": "runs DVC, which runs the stage",
}

PARENT = "BEAMLINE_PARENT"  # environment variable: the process that the child must not outlive
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
CLOCK = 2.0  # seconds by which the kernel's start time of a process may be off
GRACE = 10.0  # seconds that an interrupted stage has to take its leave of Prefect and MLflow


class StageError(RuntimeError):
    """A stage ended with an error that it, or DVC, has put on the terminal already."""


@dataclass(frozen=True)
class Stage:
    """A stage of dvc.yaml, and what its ``meta:`` asks of Prefect."""

    name: str  # "reinforce@tiny"
    retries: int = 0
    retry_delay_seconds: float = 0
    timeout_seconds: float | None = None


@dataclass(frozen=True)
class Revision:
    """Where the checkout stands. ``commit`` is empty before the first one."""

    commit: str
    dirty: bool


# ---------------------------------------------------------------- what DVC knows


def stages(recipe: str) -> list[Stage]:
    """The stages of a recipe, each after those that it depends on.

    Raises ValueError where dvc.yaml is no pipeline, has no stage for the recipe, or has a ``meta:``
    that nothing reads.
    """
    import networkx

    with _repository() as repository:
        # DVC's edges run from a stage to what it needs; the name settles what the graph leaves open
        graph = repository.index.graph.reverse()
        ordered = networkx.lexicographical_topological_sort(graph, key=lambda s: s.addressing)
        found = [_stage(each) for each in ordered if each.addressing.endswith(f"@{recipe}")]
    if not found:
        raise ValueError(
            f"dvc.yaml has no stage for the recipe '{recipe}': add it to the list 'recipes' at the "
            "top of the file"
        )
    return found


def _stage(stage: Any) -> Stage:
    meta = stage.meta or {}
    known = [field.name for field in fields(Stage)][1:]
    if unknown := sorted(set(meta) - set(known)):
        raise ValueError(
            f"dvc.yaml, stage {stage.addressing}: meta has unknown keys {unknown}: remove them, or "
            f"use some of {known}"
        )
    return Stage(stage.addressing, **meta)


def status(recipe: str) -> dict[str, list[str]]:
    """The stages of a recipe that DVC would run now, and why; empty where nothing is to be done.

    A stage that would run only because of what the stages before it will write is not listed.
    """
    names = [stage.name for stage in stages(recipe)]
    with _repository() as repository:
        found = repository.status(targets=names)
    return {name: _reasons(found[name]) for name in names if name in found}


def _reasons(changes: list[Any]) -> list[str]:
    """DVC's report as lines: [{"changed deps": {"a.yaml": {"seed": "new"}}}] → ["a.yaml seed: new"]

    Other entries than these are words already, such as "changed command".
    """
    lines = [change for change in changes if isinstance(change, str)]
    for change in changes:
        paths = {} if isinstance(change, str) else next(iter(change.values()))
        for path, what in paths.items():
            parts = what if isinstance(what, dict) else {"": what}
            lines += [f"{path} {key}".rstrip() + f": {how}" for key, how in parts.items()]
    return lines


@contextmanager
def _repository() -> Iterator[Any]:
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    _mend_rwlock(Path(".dvc/tmp"))
    try:
        with Repo(".") as repository:
            yield repository
    except DvcException as error:
        raise ValueError(f"DVC cannot read the pipeline of {Path.cwd()}: {error}") from None


def digests(stage: str) -> dict[str, str]:
    """Digest of each out of a stage, from dvc.lock; empty before the stage has ended once."""
    file = Path("dvc.lock")
    locked = yaml.safe_load(file.read_text())["stages"] if file.exists() else {}
    return {out["path"]: out["md5"] for out in locked.get(stage, {}).get("outs", [])}


def revision() -> Revision:
    """Commit of the checkout, and whether anything but what runs write differs from it."""
    commit = _git("rev-parse", "--verify", "--quiet", "HEAD")
    changes = _git("status", "--porcelain", "--", ".", ":!dvc.lock", ":!reports")
    return Revision(commit, dirty=not commit or bool(changes))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True).stdout.strip()


def sources(module: Path) -> list[str]:
    """The project files that decide what a stage's module computes, as dvc.yaml lists them.

    ``module`` and what it imports, directly or not, except NOT_DEPENDENCIES, what only these import
    and empty files.
    """
    found: set[str] = set()
    waiting = [module.as_posix()]
    while waiting:
        file = waiting.pop()
        if file not in found and file not in NOT_DEPENDENCIES:
            found.add(file)
            for name in ledger.imports(Path(file)):
                waiting += _files(name)
    return sorted(found)


def _files(name: str) -> list[str]:
    """Files with code that the import of a dotted name runs, as far as they are the project's."""
    parts = name.split(".")
    places = [Path(*parts[: length + 1]) for length in range(len(parts))]
    files = [file for place in places for file in (place / "__init__.py", place.with_suffix(".py"))]
    return [file.as_posix() for file in files if file.is_file() and file.stat().st_size]


# ---------------------------------------------------------------- running a stage


def reproduce(stage: str, **environment: str) -> None:
    """Run one stage, as ``dvc --wait-for-lock repro -s <stage>`` does, with ``environment`` added.

    Its output goes straight to the terminal. DVC and the stage end with the caller, however that
    ends. Raises StageError.
    """
    ours = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "SHELL": "/bin/sh",  # DVC would use the user's own, whatever that makes of `exec`
        PARENT: str(os.getpid()),
    }
    command = [sys.executable, "-m", "tasks.version", "--wait-for-lock", "repro", "-s", stage]
    process = subprocess.Popen(command, env=os.environ | ours | environment, start_new_session=True)
    try:
        failed = process.wait()
    except BaseException:
        _interrupt(process)
        raise
    if failed:
        raise StageError(f"stage {stage} failed")


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Let DVC's stage end by itself (DVC waits for it), then end what is left of the group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, even by SIGKILL.

    Where BEAMLINE_PARENT names the parent and another process has taken its place, it ended before
    this call, and the process exits. From here on this process is the parent of what it starts.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
        sys.exit("the process that started this one is gone")
    os.environ[PARENT] = str(os.getpid())


def _dvc(arguments: list[str]) -> int:
    """The ``dvc`` command, less what it would say after the stage: that has the last word."""
    die_with_parent()
    from dvc.cli import main
    from dvc.ui import ui

    ui.enable = lambda: None
    for handler in logging.getLogger("dvc").handlers:
        handler.addFilter(_is_news)
    _mend_rwlock(Path(".dvc/tmp"))
    return main(arguments)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of DVC's tells more than the stage and the caller do."""
    from dvc.stage.exceptions import StageCmdFailedError

    cause = record.exc_info and record.exc_info[1] and record.exc_info[1].__cause__
    if isinstance(cause, StageCmdFailedError):
        return False
    return record.levelno >= logging.WARNING or record.name.startswith("dvc.stage")


def _mend_rwlock(folder: Path) -> None:
    """Drop from DVC's list of paths in use the entries that a killed DVC has left.

    DVC does so itself where no process has the entry's id. Ids come again, though, after a restart
    of a container for one: an entry whose process is younger than the list is nobody's. A container
    without an init process also keeps the dead for ever, as zombies. And a list that was half
    written when DVC was killed says nothing at all.
    """
    import psutil
    from dvc.lock import make_lock

    file = folder / "rwlock"
    if not file.exists():
        return
    with make_lock(str(folder / "rwlock.lock")):
        written = file.stat().st_mtime

        def alive(entry: dict[str, Any]) -> bool:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(entry["pid"])
                living = process.status() != psutil.STATUS_ZOMBIE
                return living and process.create_time() <= written + CLOCK
            return False

        try:
            held = json.loads(file.read_text())
        except json.JSONDecodeError:
            held = {}
        readers = {
            path: [entry for entry in entries if alive(entry)]
            for path, entries in held.get("read", {}).items()
        }
        writers = {path: entry for path, entry in held.get("write", {}).items() if alive(entry)}
        file.write_text(json.dumps({"read": readers, "write": writers}))


if __name__ == "__main__":
    sys.exit(_dvc(sys.argv[1:]))

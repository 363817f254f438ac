"""Identify processes of this machine, and find orphans: processes whose run has ended.

Processes of a run are recognised by their command line and their checkout. One is an orphan if its
parent is no process of that checkout any more: the kernel has given it to ``init``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from flows.host.parents import PARENT
from tasks.extensions.descendants import OWNER

CLOCK = 2.0  # seconds: error of the kernel's start time of a process
END = 5.0  # seconds between SIGTERM and SIGKILL
HOST, PID, STARTED, NAMESPACE = (
    f"beamline.{name}" for name in ("host", "pid", "process_started", "pid_namespace")
)

RUNS = (".beamline", "runs")  # worktrees of runs lie below this folder of a checkout
# programs of flows/ that write no outs
NO_RUNS = ("flows.doctor", "flows.ui", "flows.workers.server", "flows.host.warm")

# ---------------------------------------------------------------- identities


def host() -> str:
    """Return this machine's name."""
    return socket.gethostname()


def identity() -> dict[str, str]:
    """Return tags that identify this process, also after a restart of the machine.

    A process id is unique only within its namespace, so the namespace (of a container) is included.
    """
    return {
        HOST: host(),
        PID: str(os.getpid()),
        STARTED: f"{psutil.Process().create_time():.2f}",
        NAMESPACE: _namespace(),
    }


def is_gone(tags: Mapping[str, str]) -> bool:
    """Return whether the process of these ``identity`` tags has ended; False if unknown."""
    return _is_here(tags) and not is_alive(tags)


def is_alive(tags: Mapping[str, str]) -> bool:
    """Return whether the process of these ``identity`` tags is running; False if unknown."""
    return _is_here(tags) and lives(int(tags[PID]), float(tags[STARTED]), exactly=True)


def _is_here(tags: Mapping[str, str]) -> bool:
    return tags.get(HOST) == host() and tags.get(NAMESPACE) == _namespace()


def lives(pid: int, at: float, exactly: bool = False) -> bool:
    """Return whether the process ``pid`` that ran at the time ``at`` (unix seconds) still runs.

    A process that was started later only has the same id. ``exactly``: ``at`` is its start time.
    """
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        started = process.create_time()
        same = abs(started - at) <= CLOCK if exactly else started <= at + CLOCK
        return same and process.status() != psutil.STATUS_ZOMBIE
    return False


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def mark(root: Path) -> str:
    """Return a digest of a checkout's path, which a sandbox's command line shows instead of it."""
    return hashlib.blake2b(str(root.resolve()).encode(), digest_size=8).hexdigest()


# ---------------------------------------------------------------- orphans


def orphans(root: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Yield the orphans of runs of the checkout ``root``, and the kind of each."""
    for process, command in _mine():
        with suppress(psutil.Error):
            kind = _kind(process, command, root)
            if kind and not _is_held(process, root):
                yield process, kind


def end(process: psutil.Process) -> None:
    """End a process and its children with SIGTERM, and after END seconds with SIGKILL."""
    with suppress(psutil.NoSuchProcess):
        victims = [process, *process.children(recursive=True)]
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.terminate()
        for victim in psutil.wait_procs(victims, timeout=END)[1]:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        psutil.wait_procs(victims, timeout=END)


def _mine() -> Iterator[tuple[psutil.Process, list[str]]]:
    """Yield this user's living processes but this one, with their command lines."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            living = process.status() != psutil.STATUS_ZOMBIE
            if living and process.uids().real == os.getuid() and process.pid != os.getpid():
                yield process, process.cmdline()


def _kind(process: psutil.Process, command: Sequence[str], root: Path) -> str | None:
    """Return the kind of a process of the checkout ``root``; None for any other process."""
    return next((kind for kind, holds in KINDS.items() if holds(process, command, root)), None)


def _program(command: Sequence[str]) -> list[str]:
    """Return the module that ``python -m`` runs, and its arguments."""
    return list(command[command.index("-m") + 1 :]) if "-m" in command else []


def _is_server(process: psutil.Process, command: Sequence[str], root: Path) -> bool:
    return _program(command)[:2] == ["flows.workers.server", "serve"] and _is_in(process, root)


def _is_mlflow(process: psutil.Process, command: Sequence[str], root: Path) -> bool:
    """Recognise the page of ``make ui``, not one that the user has started."""
    ours = _program(command)[:2] == ["mlflow", "ui"] and _is_in(process, root)
    return ours and PARENT in process.environ()


def _is_dvc(process: psutil.Process, command: Sequence[str], root: Path) -> bool:
    return _program(command)[:1] == ["flows.runs.dvc_command"] and _is_in(process, root)


def _is_stage(process: psutil.Process, command: Sequence[str], root: Path) -> bool:
    """Recognise a stage that DVC has started, not one that the user has started."""
    module = (_program(command) or [""])[0]
    stage = module.startswith("flows.") and module not in NO_RUNS and _is_in(process, root)
    return stage and "DVC_STAGE" in process.environ()


def _is_sampler(process: psutil.Process, command: Sequence[str], root: Path) -> bool:
    inside = (
        command[1:2] == ["-c"]
        and "from tasks.engines.transformers import sampling_worker" in command[2]
    )
    return inside and _is_in(process, root)


def _is_verifier(process: psutil.Process, command: Sequence[str], root: Path) -> bool:
    return str(root / "tasks/scorers/maths_worker.py") in command


def _is_sandbox(process: psutil.Process, command: Sequence[str], root: Path) -> bool:
    with suppress(ValueError, IndexError):
        config = json.loads(command[-1])
        return isinstance(config, dict) and config.get("owner") == mark(root)
    return False


def _is_of_users(process: psutil.Process, command: Sequence[str], root: Path) -> bool:
    """Recognise what a tool, world or MCP server of a user is, or has started."""
    owner = process.environ().get(OWNER)
    return owner is not None and Path(owner).is_relative_to(root)


KINDS: dict[str, Callable[[psutil.Process, Sequence[str], Path], bool]] = {
    "a Prefect server": _is_server,
    "MLflow's page": _is_mlflow,
    "a DVC that ran a stage": _is_dvc,
    "a stage": _is_stage,
    "a process that samples": _is_sampler,
    "a verifier of mathematics": _is_verifier,
    "a sandbox": _is_sandbox,
    "a process of a user's tool or world": _is_of_users,
}


def _is_in(process: psutil.Process, root: Path) -> bool:
    return Path(process.cwd()).is_relative_to(root)


def _is_held(process: psutil.Process, root: Path) -> bool:
    """Return whether a process has a parent that belongs to the checkout."""
    parent = process.parent()
    if parent is None:
        return False
    with suppress(psutil.AccessDenied, psutil.NoSuchProcess):
        if _kind(parent, parent.cmdline(), root):
            return True  # which may be an orphan itself, and is ended with its children
        python = re.match(r"python|dvc|pytest", parent.name()) is not None
        return python and parent.uids().real == os.getuid() and _is_in(parent, root)
    return False


# ---------------------------------------------------------------- who may write where


def runs(root: Path) -> list[list[str]]:
    """List command lines of living processes that write in a checkout, without its worktrees."""
    commands = []
    for process, command in _mine():
        with suppress(psutil.Error):
            if checkout_of(Path(process.cwd())) == root and _writes(command):
                commands.append(command)
    return commands


def _writes(command: Sequence[str]) -> bool:
    """Return whether a command line is a run's: a program of flows/, DVC or a Prefect worker."""
    module = (_program(command) or [""])[0]
    if module in NO_RUNS:
        return False
    programs = [Path(word).name for word in command[:2]]
    return module.startswith(("flows.", "tasks.", "prefect", "dvc")) or "dvc" in programs


def holds(command: Sequence[str], recipe: str, recipes: Sequence[str]) -> bool:
    """Return whether a command may write for a recipe: it names this recipe, or none."""
    named = {word.rpartition("@")[2] for word in command} & set(recipes)
    return not named or recipe in named


def checkout_of(folder: Path) -> Path:
    """Return the checkout of a folder: a run's worktree, or the nearest folder with ``.git``."""
    for candidate in (folder, *folder.parents):
        if candidate.parts[-3:-1] == RUNS or (candidate / ".git").exists():
            return candidate
    return folder


def work_below(folder: Path) -> bool:
    """Return whether a living process works in a folder."""
    for process, _ in _mine():
        with suppress(psutil.Error):
            if _is_in(process, folder):
                return True
    return False


def may_have_made(file: Path, root: Path) -> bool:
    """Return whether a living git or run of the checkout may have written ``file``.

    A process that was started after the file was written has not.
    """
    with suppress(FileNotFoundError):
        written = file.stat().st_mtime
        for process, command in _mine():
            with suppress(psutil.Error):
                maker = "git" in process.name() or _writes(command)
                if maker and process.create_time() <= written + CLOCK and _is_in(process, root):
                    return True
    return False

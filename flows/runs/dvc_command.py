"""Run DVC so that it ends with its caller, and open its repository.

Run as a program, this module is the ``dvc`` command as ``reproduce`` needs it. DVC is imported
where it is needed: most calls do without, and the import takes a second.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from flows import end_import_phase
from flows.host import processes

HERE = Path()
PARENT = "BEAMLINE_PARENT"  # environment variable: the process that the child must not outlive
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
GRACE = 10.0  # seconds that an interrupted stage has to take its leave of Prefect and MLflow


class StageError(RuntimeError):
    """A stage ended with an error that it, or DVC, has put on the terminal already."""


@contextmanager
def open_repository(root: Path = HERE) -> Iterator[Any]:
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    _mend_rwlock(root / ".dvc/tmp")
    try:
        with Repo(str(root)) as repository:
            yield repository
    except DvcException as error:
        raise ValueError(f"DVC cannot read the pipeline of {root.absolute()}: {error}") from None


# ---------------------------------------------------------------- running a stage


def reproduce(stage: str, root: Path = HERE, /, **environment: str) -> None:
    """Run one stage, as ``dvc --wait-for-lock repro -s <stage>`` does, with ``environment`` added.

    Its output goes straight to the terminal. DVC and the stage end with the caller, however that
    ends. Raises StageError.
    """
    ours = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "SHELL": "/bin/sh",  # DVC would use the user's own, whatever that makes of `exec`
    }
    command = ["flows.runs.dvc_command", "--wait-for-lock", "repro", "-s", stage]
    if supervise(command, ours | environment, root):
        raise StageError(f"stage {stage} failed")


def supervise(
    module: Sequence[str], environment: dict[str, str], root: Path = HERE, grace: float = GRACE
) -> int:
    """Run ``python -m <module> …`` in ``root`` to its end; its exit status.

    It ends with the caller: interrupted together with it, with ``grace`` seconds to take its leave,
    and killed with it where it calls ``die_with_parent``.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", *module],
        cwd=root,
        env=os.environ | {PARENT: str(os.getpid())} | environment,
        start_new_session=True,
    )
    try:
        return process.wait()
    except BaseException:
        _interrupt(process, grace)
        raise


def _interrupt(process: subprocess.Popen[bytes], grace: float) -> None:
    """Let DVC's stage end by itself (DVC waits for it), then end what is left of the group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)
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
    end_import_phase()
    die_with_parent()
    if arguments[:1] == ["--cd"]:  # DVC's own comes too late for the lock
        os.chdir(arguments[1])
        del arguments[:2]
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
    from dvc.lock import make_lock

    file = folder / "rwlock"
    if not file.exists():
        return
    with make_lock(str(folder / "rwlock.lock")):
        alive = partial(_holds, written=file.stat().st_mtime)
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


def dvc_quietly(place: Path, *arguments: str) -> int:
    command = [
        sys.executable,
        "-m",
        "flows.runs.dvc_command",
        "--cd",
        str(place.absolute()),
        *arguments,
    ]
    environment = os.environ | {PARENT: str(os.getpid())}
    return subprocess.run(command, env=environment, capture_output=True).returncode


def _holds(entry: Mapping[str, Any], written: float) -> bool:
    """Whether the process of an entry, in a list that was ``written`` then, still runs."""
    return processes.lives(entry["pid"], written)


# ---------------------------------------------------------------- what crashes leave


def dead_locks() -> list[str]:
    """The paths that DVC takes for being in use by processes that are gone; see ``free_locks``."""
    file = Path(".dvc/tmp/rwlock")
    if not file.exists():
        return []
    try:
        held, written = json.loads(file.read_text()), file.stat().st_mtime
    except json.JSONDecodeError:
        return [f"{file}, which is half-written"]
    entries = [*held.get("read", {}).items()]
    entries += [(path, [entry]) for path, entry in held.get("write", {}).items()]
    dead = [path for path, some in entries if not all(_holds(each, written) for each in some)]
    return sorted(set(dead))


def free_locks() -> None:
    """Drop the entries of ``dead_locks``."""
    _mend_rwlock(Path(".dvc/tmp"))


if __name__ == "__main__":
    sys.exit(_dvc(sys.argv[1:]))

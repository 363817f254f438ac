"""Open DVC's repository; run DVC as a child process that always ends with its caller.

Run as a program, this module is the ``dvc`` command in the form that ``reproduce`` needs, and also
``beamline dvc``. DVC is imported where it is used: most calls do without, and the import takes a
second.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from flows import end_import_phase, exit_fast
from flows.host import files, processes
from flows.host.addresses import without_password
from flows.host.parents import PARENT, die_with_parent
from flows.runs import dvc_settings, earlier_outs, git

HERE = Path()
DIGEST = re.compile(r"[0-9a-f]{32}(\.dir)?")  # of DVC; a path in its cache is made of it
SHOWN = 200  # characters of an entry of a folder in a message
GRACE = 10.0  # shutdown grace period in seconds
RUN = "BEAMLINE_RUN"  # environment variable: the run whose stages this process runs
INTERRUPTED = 130  # the exit status of a shell after SIGINT
EMPTY_OUT = "'%s' is empty."  # DVC's warning: a stage that has nothing to do writes an empty file
KILLED = 137  # and after SIGKILL
DAMAGED_LOCK_REMEDY = (
    "`git checkout dvc.lock` brings back the one that was committed; where none was, remove the "
    "file. Stages run again, but what has ended of them is found"
)


class StageError(RuntimeError):
    """A stage failed; the error has already been printed."""


class KilledError(StageError):
    """A process was killed, by the kernel for one; the same call goes on."""


@contextmanager
def open_repository(root: Path = HERE) -> Iterator[Any]:
    """Open DVC's repository at ``root``; DVC prints only warnings and errors.

    Raises ValueError where there is none or no git repository, where dvc.yaml or DVC's settings are
    invalid, and where another run has the files in use that are to be read.
    """
    from dvc.exceptions import DvcException
    from dvc.logger import set_loggers_level
    from dvc.repo import Repo

    git.forget_other_repositories()
    _mend_rwlock(root / ".dvc/tmp")
    _mend_files_of_dvc()
    dvc_settings.load(root / ".dvc")
    try:
        with set_loggers_level(logging.WARNING), Repo(str(root)) as repository:
            yield repository
    except DvcException as error:
        raise ValueError(_explained(error, root.absolute())) from None
    except ValueError as error:  # of a library that reads git's files, for instance
        raise ValueError(git.fault(root) or str(error)) from None


def _explained(error: Exception, root: Path) -> str:
    """Return what happened and what to do about it; DVC's own remedies do not fit runs."""
    from dvc.lock import LockError
    from dvc.scm import SCMError

    if isinstance(error, LockError):
        holders = sorted(set(re.findall(r"PID (\d+)", str(error))))
        who = f" (process {', '.join(holders)})" if holders else ""
        return (
            f"another run has files of this recipe in {root} in use{who}: wait until it has ended, "
            "or run as a commit, without --here, which has a checkout of its own; make doctor "
            "clears what a crash has left"
        )
    if isinstance(error, SCMError):
        return git.fault(root) or f"DVC cannot use the git repository of {root}: {error}"
    remedy = f": {DAMAGED_LOCK_REMEDY}" if "dvc.lock" in str(error) else ""
    return f"DVC cannot read the pipeline of {root}: {without_password(str(error))}{remedy}"


# ---------------------------------------------------------------- running a stage


def reproduce(stage: str, root: Path = HERE, /, **environment: str) -> None:
    """Run one stage, as ``dvc --wait-for-lock repro -s <stage>`` does, with ``environment`` added.

    Its output goes straight to the terminal. DVC and the stage end with the caller, even if it is
    killed. Raises StageError, or KilledError.
    """
    ours = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "SHELL": "/bin/sh",  # DVC would use the user's, which may treat `exec` otherwise
    }
    from flows.runs import local_policies  # with recipes

    command = ["flows.runs.dvc_command", "--wait-for-lock", "repro", "-s", stage]
    verb, _, recipe = stage.partition("@")
    if verb in local_policies.READERS and stage in local_policies.changed(recipe, root):
        command.append("--force")
    status = supervise(command, ours | environment, root)
    if was_killed(status):
        raise KilledError(f"stage {stage} was killed")
    if status:
        raise StageError(f"stage {stage} failed")


def was_killed(status: int) -> bool:
    """Return whether an exit status is that of a killed process, or of one that lost a child so."""
    return status < 0 or status == KILLED


def supervise(
    module: Sequence[str], environment: dict[str, str], root: Path = HERE, grace: float = GRACE
) -> int:
    """Run ``python -m <module> …`` in ``root`` and return its exit status.

    It is interrupted together with the caller and has ``grace`` seconds to shut down. It is killed
    with the caller if it calls ``die_with_parent``.
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
    """Interrupt DVC, which waits for its stage; after ``grace`` seconds kill the process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _dvc(arguments: list[str]) -> int:
    """Run the ``dvc`` command; for a caller of ours, only stages and warnings print."""
    end_import_phase()
    by_hand = PARENT not in os.environ
    die_with_parent()
    if arguments[:1] == ["--cd"]:  # DVC's own --cd comes after the lock
        os.chdir(arguments[1])
        del arguments[:2]
    git.forget_other_repositories()
    if by_hand:
        from params import recipe_files  # half a second, which only a person's call needs

        recipe_files.refresh_all(Path("params"))
    from dvc.cli import main
    from dvc.ui import ui

    if not by_hand:
        ui.enable = lambda: None  # the stage's output comes last
    logging.getLogger("dvc").propagate = False  # Prefect, if it is loaded, would print all again
    killed: list[str] = []  # DVC's exit status does not tell

    def is_needed(record: logging.LogRecord) -> bool:
        killed.extend(filter(None, [_signal_of(record)]))
        return _is_needed(record)

    for handler in logging.getLogger("dvc").handlers:
        handler.addFilter(is_needed)
    _mend_rwlock(Path(".dvc/tmp"))
    _mend_files_of_dvc()
    status = main(arguments)
    return KILLED if killed else status


def _signal_of(record: logging.LogRecord) -> str:
    """Return the number of the signal that has ended a stage's process, if a log line has one."""
    error = record.exc_info and record.exc_info[1]
    matched = re.search(r"exited with -(\d+)$", str(error and error.__cause__))
    return matched[1] if matched else ""


def _is_needed(record: logging.LogRecord) -> bool:
    """Return whether a log line of DVC adds anything to the output of the stage and the caller.

    The line of a stage whose files another run has in use gets our words.
    """
    from dvc.lock import LockError
    from dvc.stage.exceptions import StageCmdFailedError

    error = record.exc_info and record.exc_info[1]
    cause = error and error.__cause__
    for busy in (error, cause):
        if isinstance(busy, LockError):
            record.msg, record.args, record.exc_info = _explained(busy, Path.cwd()), (), None
    if isinstance(cause, StageCmdFailedError) or record.msg == EMPTY_OUT:
        return False
    return record.levelno >= logging.WARNING or record.name.startswith("dvc.stage")


def _mend_rwlock(folder: Path) -> None:
    """Drop the entries of killed processes from DVC's list of paths in use.

    DVC does so itself where no process has the entry's id. But ids are reused, after a restart of a
    container for one: an entry whose process is younger than the list is stale. In a container
    without an init process, the dead also stay for ever as zombies. A half-written list holds no
    entry.
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


@contextmanager
def modified(path: str | os.PathLike[str], fs: Any = None) -> Iterator[Any]:
    """Yield the content of a YAML file of DVC; what the block makes of it replaces the whole file.

    DVC empties the file before it writes it: a kill in between, or a reader, gets half a file. It
    also reads comments and layout, which takes five times as long, and dvc.lock has none.
    """
    from dvc.utils.serialize import dump_yaml, load_yaml

    content = load_yaml(path, fs=fs) if Path(path).exists() else {}
    yield content
    with files.replaced(Path(path)) as partial:
        dump_yaml(partial, content)


def _mend_files_of_dvc() -> None:
    """Have DVC itself write dvc.lock with ``modified`` and read whole runs, in this process."""
    from dvc import dvcfile
    from dvc.stage.cache import StageCache

    _mend_settings()
    _mend_linked_worktrees()
    _preserve_outs()
    dvcfile.modify_yaml = modified
    StageCache._load_cache = _run
    StageCache._load = _newest_run
    _fill_recipes_of_dvc()
    _refuse_paths_in_caches()


@functools.cache
def _mend_settings() -> None:
    """Have DVC write its settings as UTF-8, as it reads them, in this process.

    It would write ASCII, which has no letters such as those of a folder's name.
    """
    import configobj

    library: Any = configobj.ConfigObj
    initialise = library.__init__

    def in_utf8(settings: Any, *arguments: Any, **options: Any) -> None:
        initialise(settings, *arguments, **{"default_encoding": "utf-8", **options})

    library.__init__ = in_utf8


@functools.cache
def _refuse_paths_in_caches() -> None:
    """Have DVC take only folders whose files stay inside and have digests, in this process.

    A folder is a list of paths and digests in the cache or a remote, under its own digest, which a
    commit of somebody else may name. DVC joins both to paths as they are.
    """
    from dvc.exceptions import DvcException
    from dvc_data.hashfile.tree import Tree

    tree: Any = Tree
    parsed = tree.from_list.__func__

    def checked(kind: Any, entries: list[dict[str, Any]], *arguments: Any, **options: Any) -> Any:
        for entry in entries:
            if not is_folder_entry(entry):
                shown = ascii(entry)[:SHOWN]
                raise DvcException(f"a folder in DVC's cache has a file outside of it: {shown}")
        return parsed(kind, entries, *arguments, **options)

    tree.from_list = classmethod(checked)


def is_folder_entry(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of a folder in DVC's cache is a file inside, with a digest."""
    path, digest = entry.get("relpath"), entry.get("md5")
    parts = path.split("/") if isinstance(path, str) else [""]
    return (
        not {"", ".", ".."} & set(parts)
        and "\0" not in "".join(parts)
        and isinstance(digest, str)
        and DIGEST.fullmatch(digest) is not None
    )


@functools.cache
def _preserve_outs() -> None:
    """Have DVC keep the earlier outs of a stage until it has made new ones, in this process."""
    from dvc.stage import Stage
    from dvc.stage.decorators import rwlocked

    library: Any = Stage
    run_stage = library.run

    @rwlocked(read=["deps", "outs"])  # refused, as DVC's own, while another process writes them
    def run(stage: Any, dry: bool = False, **options: Any) -> None:
        if dry or stage.frozen or not stage.cmd:
            run_stage(stage, dry=dry, **options)
            return
        root = Path(stage.repo.root_dir)
        edited = {out.fs_path for out in stage.outs if out.persist}  # in place, by the stage
        paths = [Path(out.fs_path) for out in stage.outs if out.fs_path not in edited]
        outs = [path.relative_to(root).as_posix() for path in paths if path.is_relative_to(root)]
        with earlier_outs.preserved(stage.addressing.replace("/", "_"), outs, root):
            run_stage(stage, dry=dry, **options)

    library.run = run


@functools.cache
def _mend_linked_worktrees() -> None:
    """Have DVC's library find the root of a linked worktree of a submodule, in this process.

    It takes core.worktree, which names the submodule's own checkout, for that of every worktree;
    git takes it for that one alone.
    """
    from dulwich import repo

    library: Any = repo.Repo
    discover = library.discover

    def discovered(*arguments: Any, **options: Any) -> Any:
        repository = discover(*arguments, **options)
        linked = Path(repository.controldir(), "gitdir")  # names the file .git of the worktree
        if linked.is_file():
            repository.path = str(Path(linked.parent, linked.read_text().strip()).parent)
        return repository

    library.discover = discovered


@functools.cache
def _fill_recipes_of_dvc() -> None:
    """Have DVC read a key that a recipe leaves out with its default, in this process.

    DVC itself refuses a file without a key that dvc.yaml names.
    """
    from dvc.dependency import ParamsDependency

    read = ParamsDependency.read_params

    def filled(dependency: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        values = read(dependency, *arguments, **options)
        return _defaults_of(set(dependency.params) - set(values)) | values

    ParamsDependency.read_params = filled


def _defaults_of(keys: set[str]) -> dict[str, Any]:
    """Return the defaults of those keys that a recipe may leave out."""
    if not keys:
        return {}
    from params.schema.defaults import defaults  # half a second, for such recipes alone

    return {key: defaults()[key] for key in keys & defaults().keys()}


def _run(runs: Any, key: str, name: str) -> Any:
    """Return an entry of DVC's run-cache, or None where it is missing or damaged.

    An entry is named by the digest of its content. DVC writes it under a temporary name in the same
    folder; a kill leaves half of it there, which may be valid YAML, and DVC would take it.
    """
    from dvc.stage.cache import _get_cache_hash
    from dvc.utils.serialize import YAMLFileCorruptedError, load_yaml

    try:
        entry = load_yaml(runs._get_cache_path(key, name))
    except (FileNotFoundError, UnicodeDecodeError, YAMLFileCorruptedError):
        return None
    if not isinstance(entry, dict) or _get_cache_hash(entry) != name:
        return None
    # the key has the paths of the outs: an entry with others would be written elsewhere
    return entry if _get_cache_hash(dict(entry), key=True) == key else None


def _newest_run(runs: Any, stage: Any) -> Any:
    """Return the newest whole entry of the run-cache for a stage and its inputs, or None."""
    from dvc.stage.cache import _get_stage_hash

    key = _get_stage_hash(stage)
    folder = Path(runs._get_cache_dir(key))
    entries = folder.iterdir() if folder.exists() else iter(())
    newest = sorted(entries, key=lambda path: path.stat().st_mtime, reverse=True)
    return next(filter(None, (_run(runs, key, path.name) for path in newest)), None)


def dvc_quietly(root: Path, *arguments: str) -> str | None:
    """Run a DVC command at ``root`` without output; return why it failed, or None if it did not."""
    command = [
        sys.executable,
        "-m",
        "flows.runs.dvc_command",
        "--cd",
        str(root.absolute()),
        *arguments,
    ]
    environment = os.environ | {PARENT: str(os.getpid())}
    done = subprocess.run(command, env=environment, capture_output=True)
    said = " ".join(done.stderr.decode(errors="replace").removeprefix("ERROR: ").split())
    return without_password(said) or f"exit status {done.returncode}" if done.returncode else None


def _holds(entry: Mapping[str, Any], written: float) -> bool:
    """Return whether the process of an entry, in a list ``written`` at that time, still runs."""
    return processes.lives(entry["pid"], written)


# ---------------------------------------------------------------- stale locks


def dead_locks() -> list[str]:
    """List the paths that DVC's list has in use by processes that have ended."""
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
    """Drop the entries that ``dead_locks`` lists."""
    _mend_rwlock(Path(".dvc/tmp"))


if __name__ == "__main__":
    exit_fast(_dvc(sys.argv[1:]))

"""Git and DVC: the stages of a recipe, whether they must run, running one, and what came of it.

Everything is relative to the current folder, which is the project's root, or to ``root``, which is
that of another checkout. DVC is imported where it is needed, for most of what calls this module
does without. Run as a program, it is the ``dvc`` command as ``reproduce`` needs it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tasks import commits, ledger, processes

# The one list of project modules that a stage imports and that dvc.yaml still does not name among
# its deps: what they do cannot reach an out.
NOT_DEPENDENCIES = {
    "flows/server.py": "finds or starts the Prefect server",
    "flows/stage.py": "checks the recipe and tells Prefect that the stage runs",
    "tasks/commits.py": "reads and writes git's history",
    "tasks/disk.py": "refuses a run that the disk has no room for",
    "tasks/figures.py": "draws what track keeps",
    "tasks/progress.py": "shows how far a stage has come",
    "tasks/spans.py": "words for MLflow what the ledger keeps",
    "tasks/store.py": "copies what the ledger holds",
    "tasks/track.py": "writes to MLflow and to nothing else",
    "tasks/version.py": "runs DVC, which runs the stage",
}

HERE = Path()
PARENT = "BEAMLINE_PARENT"  # environment variable: the process that the child must not outlive
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
CONNECT = 30  # seconds that an SSH server has to answer, where the remote does not say
GRACE = 10.0  # seconds that an interrupted stage has to take its leave of Prefect and MLflow


class StageError(RuntimeError):
    """A stage ended with an error that it, or DVC, has put on the terminal already."""


@dataclass(frozen=True)
class Stage:
    """A stage of dvc.yaml, and what its ``meta:`` asks of Prefect."""

    name: str  # "reinforce@tiny"
    pool: str | None = None  # of the workers that it is sent to, where it can be (flows/dispatch)
    retries: int = 0
    retry_delay_seconds: float = 0
    timeout_seconds: float | None = None


@dataclass(frozen=True)
class Belongings:
    """What a stage reads and writes, by what carries it to another checkout. Paths in its root."""

    tracked: list[str]  # dependencies that DVC keeps
    loose: list[str]  # dependencies that neither DVC nor the last commit has
    cached: list[str]  # outs that DVC keeps
    small: list[str]  # outs that are left to git


# ---------------------------------------------------------------- what DVC knows


def stages(recipe: str, root: Path = HERE) -> list[Stage]:
    """The stages of a recipe, each after those that it depends on.

    Raises ValueError where dvc.yaml is no pipeline, has no stage for the recipe, or has a ``meta:``
    that nothing reads.
    """
    import networkx

    with _repository(root) as repository:
        # DVC's edges run from a stage to what it needs; the name settles what the graph leaves open
        graph = repository.index.graph.reverse()
        ordered = networkx.lexicographical_topological_sort(graph, key=lambda s: s.addressing)
        found = [_stage(each) for each in ordered if _name(each).endswith(f"@{recipe}")]
    if not found:
        raise ValueError(
            f"dvc.yaml has no stage for the recipe '{recipe}': add it to the list 'recipes' at the "
            "top of the file"
        )
    return found


def _name(stage: Any) -> str:
    """The name in dvc.yaml, which DVC itself precedes by a path where that is not the current one.

    What a .dvc file tracks is to DVC a stage without one.
    """
    return getattr(stage, "name", None) or ""


def _stage(stage: Any) -> Stage:
    meta = stage.meta or {}
    known = [field.name for field in fields(Stage)][1:]
    if unknown := sorted(set(meta) - set(known)):
        raise ValueError(
            f"dvc.yaml, stage {_name(stage)}: meta has unknown keys {unknown}: remove them, or "
            f"use some of {known}"
        )
    return Stage(_name(stage), **meta)


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
def _repository(root: Path = HERE) -> Iterator[Any]:
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    _mend_rwlock(root / ".dvc/tmp")
    try:
        with Repo(str(root)) as repository:
            yield repository
    except DvcException as error:
        raise ValueError(f"DVC cannot read the pipeline of {root.absolute()}: {error}") from None


def locked(root: Path = HERE) -> dict[str, Any]:
    """What dvc.lock says of each stage that has ended once."""
    file = root / "dvc.lock"
    return (yaml.safe_load(file.read_text()) or {}).get("stages", {}) if file.exists() else {}


def digests(stage: str, root: Path = HERE) -> dict[str, str]:
    """Digest of each out of a stage, from dvc.lock; empty before the stage has ended once."""
    return {out["path"]: out["md5"] for out in locked(root).get(stage, {}).get("outs", [])}


# ---------------------------------------------------------------- where DVC keeps things


def default_store() -> str | None:
    """The address of the ledger's second place in DVC's default remote; None without a remote."""
    remote = _config()["core"].get("remote")
    return f"remote://{remote}/ledger" if remote else None


def filesystem(address: str) -> Callable[[], tuple[Any, str]]:
    """What connects to ``address`` anew, giving a filesystem of fsspec and the folder in it.

    ``address``: a folder, or what ``dvc remote add`` takes, ``remote://<name>/<path>`` included;
    the credentials are those of DVC's remote. Raises ValueError where DVC cannot make sense of it.
    """
    from dvc.exceptions import DvcException
    from dvc.fs import get_cloud_fs, known_implementations

    scheme, mark, _ = address.partition("://")
    url = address if mark else str(Path(address).expanduser().absolute())
    try:
        if mark and scheme not in (*known_implementations, "remote"):
            raise ImportError(f"no kind of store is called '{scheme}'")
        kind, settings, path = get_cloud_fs(_config(), url=url)
    except (DvcException, ImportError) as error:
        raise ValueError(
            f"the store {address} cannot be used: {error}; correct BEAMLINE_STORE or DVC's default "
            "remote, or install DVC's extra for it"
        ) from None
    if kind.protocol == "ssh":
        settings.setdefault("timeout", CONNECT)

    def connect() -> tuple[Any, str]:
        found = kind(**settings)
        return found.fs, path

    return connect


def _config() -> Any:
    from dvc.config import Config

    return Config(".dvc" if Path(".dvc").is_dir() else None)


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


# ---------------------------------------------------------------- what other runs have left


def restore(digest: str, target: Path) -> None:
    """Copy a file or folder to ``target`` by its digest, from DVC's cache or else from the remote.

    digest: DVC's, such as "eb26…89.dir". Raises ValueError where neither has it whole.
    """
    with _repository() as repository:
        cache = repository.cache.local
        folder = digest.endswith(".dir")
        listed = _listed(repository, digest) if folder else [((), _hash_info(digest))]
        _need(repository, [info for _, info in listed])
        for parts, info in listed:
            _copy(Path(cache.oid_to_path(info.value)), target.joinpath(*parts), info.value)


def _hash_info(digest: str) -> Any:
    from dvc_data.hashfile.hash_info import HashInfo

    return HashInfo("md5", digest)


def _listed(repository: Any, digest: str) -> list[tuple[tuple[str, ...], Any]]:
    """The files of a folder by its digest: parts of the path, and what DVC calls a hash info."""
    from dvc_data.hashfile import load

    wanted = _hash_info(digest)
    _need(repository, [wanted])
    folder: Any = load(repository.cache.local, wanted)
    return [(parts, info) for parts, _, info in folder]


def kept_folder(digest: str) -> dict[str, str]:
    """The files in a folder that DVC keeps, by its digest: path in it -> digest.

    Raises ValueError as ``restore``.
    """
    with _repository() as repository:
        return {"/".join(parts): info.value for parts, info in _listed(repository, digest)}


def kept_file(digest: str) -> bytes:
    """A file that DVC keeps, by its digest. Raises ValueError as ``restore``."""
    with _repository() as repository:
        _need(repository, [_hash_info(digest)])
        return Path(repository.cache.local.oid_to_path(digest)).read_bytes()


def keep(folder: Path) -> str:
    """Copy a folder into DVC's cache; its digest, which ``restore`` takes."""
    from dvc_data.hashfile.build import build
    from dvc_data.hashfile.transfer import transfer
    from dvc_objects.fs.local import LocalFileSystem

    with _repository() as repository:
        cache = repository.cache.local
        staging, _, made = build(cache, str(folder.absolute()), LocalFileSystem(), "md5")
        transfer(staging, cache, {made.hash_info}, shallow=False)
        return str(made.hash_info.value)


def digest_of(path: Path) -> str:
    """The digest that DVC gives a file or a folder as it is now."""
    from dvc_data.hashfile.build import build
    from dvc_objects.fs.local import LocalFileSystem

    with _repository() as repository:
        place, cache = str(path.absolute()), repository.cache.local
        _, _, made = build(cache, place, LocalFileSystem(), "md5", dry_run=True)
        return str(made.hash_info.value)


def _need(repository: Any, wanted: list[Any]) -> None:
    """Have these in DVC's cache, from its remote where need be; ValueError where it lacks one."""
    from dvc.config import NoRemoteError

    def missing() -> list[Any]:
        return [info for info in wanted if not repository.cache.local.exists(info.value)]

    logging.getLogger("dvc.data_cloud").setLevel(logging.ERROR)  # the error below says it
    remote = "its remote does, too"
    if lacking := missing():
        try:
            repository.cloud.pull(lacking)
        except NoRemoteError:
            remote = "no remote is set"
    if lacking := missing():
        raise ValueError(
            f"DVC's cache lacks {lacking[0].value}, and {remote}: bring the cache of the machine "
            "that made it, or `dvc push` there to a shared remote"
        )


def _copy(source: Path, target: Path, digest: str) -> None:
    """Copy a file of the cache; ValueError where it is not what its name says."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    with target.open("rb") as stream:
        found = hashlib.file_digest(stream, "md5").hexdigest()
    if found != digest:
        raise ValueError(f"{source} is damaged: remove it, and `dvc fetch` brings it back")


CHOICE_OF_CHAMPION = "champion"  # the stage that a new champion alone would run again


def already_run(recipe: str, root: Path = Path()) -> str | None:
    """The newest branch of a run that was made of what is in ``root``; None where something is new.

    Compared are the commands, parameters and source files of every stage, questions included. That
    the champion is another one since is nothing new to learn from.
    """
    with chdir(root):
        here = _made_of(recipe)
    for branch in commits.runs(recipe):
        try:
            locked = yaml.safe_load(commits.content(branch, "dvc.lock"))["stages"]
        except (ValueError, KeyError, TypeError):
            continue  # a branch of another kind
        if all(_same(made_of, locked.get(name)) for name, made_of in here.items()):
            return branch
    return None


def _made_of(recipe: str) -> dict[str, dict[str, Any]]:
    """What each stage is made of, less what other stages make, in the words of dvc.lock."""
    from dvc.dependency import ParamsDependency

    with _repository() as repository:
        every = [
            stage
            for stage in repository.index.stages
            if stage.addressing.endswith(f"@{recipe}")
            and not stage.addressing.startswith(f"{CHOICE_OF_CHAMPION}@")
        ]
        made = {
            out.def_path for stage in repository.index.stages if stage.deps for out in stage.outs
        }
        return {
            stage.addressing: {
                "cmd": stage.cmd,
                "params": {
                    dep.def_path: dep.read_params()
                    for dep in stage.deps
                    if isinstance(dep, ParamsDependency)
                },
                "deps": {
                    dep.def_path: dep.get_hash().value if dep.exists else None
                    for dep in stage.deps
                    if not isinstance(dep, ParamsDependency) and dep.def_path not in made
                },
            }
            for stage in every
        }


def _same(made_of: dict[str, Any], locked: dict[str, Any] | None) -> bool:
    if locked is None:
        return False
    deps = {dep["path"]: dep.get("md5") for dep in locked.get("deps", [])}
    return (
        made_of["cmd"] == locked["cmd"]
        and made_of["params"] == locked.get("params", {})
        and all(deps.get(path) == digest for path, digest in made_of["deps"].items())
    )


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
    command = ["tasks.version", "--wait-for-lock", "repro", "-s", stage]
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


# ---------------------------------------------------------------- other checkouts


def share(place: Path) -> None:
    """Give the worktree at ``place`` this project's DVC settings, remotes and cache.

    They go to its config.local, with paths that hold there.
    """
    with _repository() as here, _repository(place) as there:
        settings = here.config.load_config_to_level()
        with there.config.edit("local") as local:
            local.clear()
            local.update(settings)
            local.setdefault("cache", {})["dir"] = here.cache.local_cache_dir


def forget_runs(place: Path) -> None:
    """Take DVC's memory of runs, and the remote, from a worktree that shares this project's cache.

    What it then runs, it runs from nothing. Files of the cache stay within reach.
    """
    own = place.absolute() / ".beamline" / "cache"
    own.mkdir(parents=True)
    with _repository() as here, _repository(place) as there:
        shared = Path(here.cache.local_cache_dir, "files")
        shared.mkdir(parents=True, exist_ok=True)
        (own / "files").symlink_to(shared)  # beside it lie the runs, of which there are none
        with there.config.edit("local") as local:
            local["cache"]["dir"] = str(own)
            local.setdefault("core", {})["remote"] = ""


def default_remote(root: Path = HERE) -> str | None:
    """The name of DVC's default remote, where one is set."""
    with _repository(root) as repository:
        return repository.config["core"].get("remote") or None


def provide_sources(place: Path) -> None:
    """Put what .dvc files track, and earlier outs as far as the cache has them, into a worktree.

    Raises RuntimeError where something that a .dvc file tracks is in neither cache nor remote.
    """
    _dvc_quietly(place, "checkout", "--force", "--allow-missing")
    with _repository(place) as repository:
        sources = [stage for stage in repository.index.stages if stage.is_data_source]
        lacking = [each for each in sources if not all(Path(o.fs_path).exists() for o in each.outs)]
        files = [str(Path(each.path).relative_to(place.absolute())) for each in lacking]
    if files:
        _pull_run(place, *files)


def restore_run(recipe: str, place: Path) -> None:
    """Put the outs of a recipe's stages that dvc.lock names into a worktree, from cache or remote.

    With a remote, DVC's memory of runs (its run-cache) comes along. Raises RuntimeError where
    something is in neither.
    """
    targets = ["--with-deps", *(stage.name for stage in stages(recipe, place))]
    if _dvc_quietly(place, "checkout", "--force", *targets):
        _pull_run(place, "--run-cache", "--force", *targets)


def _pull_run(place: Path, *targets: str) -> None:
    if default_remote(place) is None:
        raise RuntimeError(
            f"{', '.join(t for t in targets if not t.startswith('-'))}: not all of it is in DVC's "
            "cache here, and there is no default remote to pull it from: `dvc remote add --default`"
        )
    if supervise(["tasks.version", "--cd", str(place.absolute()), "pull", *targets], {}):
        raise RuntimeError(f"dvc pull failed in {place}")


def push(recipe: str, place: Path) -> None:
    """Push what a worktree's run has made, with the run-cache, where a default remote is set.

    Raises RuntimeError where that fails; DVC has said why.
    """
    if default_remote(place) is None:
        return
    targets = ["--run-cache", "--with-deps", *(stage.name for stage in stages(recipe, place))]
    if supervise(["tasks.version", "--cd", str(place.absolute()), "push", *targets], {}):
        raise RuntimeError("dvc push failed")


def _dvc_quietly(place: Path, *arguments: str) -> int:
    command = [sys.executable, "-m", "tasks.version", "--cd", str(place.absolute()), *arguments]
    environment = os.environ | {PARENT: str(os.getpid())}
    return subprocess.run(command, env=environment, capture_output=True).returncode


# ---------------------------------------------------------------- a stage that runs elsewhere


def belongings(stage: str, root: Path = HERE) -> Belongings:
    """What a stage reads and writes, and what can carry it."""
    base = root.absolute()
    with _repository(root) as repository:
        found = next(each for each in repository.index.stages if _name(each) == stage)
        reads = sorted({_below(base, dep.fs_path) for dep in found.deps})
        kept = [_below(base, out.fs_path) for out in repository.index.outs if out.use_cache]
        writes = [(_below(base, out.fs_path), out.use_cache) for out in found.outs]
    tracked = {path: _overlap(path, kept) for path in reads}
    return Belongings(
        tracked=sorted({each for overlap in tracked.values() for each in overlap}),
        loose=[path for path in reads if not tracked[path] and not commits.committed(path, root)],
        cached=[path for path, use_cache in writes if use_cache],
        small=[path for path, use_cache in writes if not use_cache],
    )


def _below(base: Path, path: str) -> str:
    return Path(path).relative_to(base).as_posix()


def _overlap(path: str, kept: list[str]) -> list[str]:
    """The path itself where it lies in one of ``kept``, and those of ``kept`` that lie in it."""
    inside = [path] if any(Path(path).is_relative_to(each) for each in kept) else []
    return inside + [each for each in kept if Path(each).is_relative_to(path) and each != path]


def is_done(stage: str) -> bool:
    """Whether DVC would not run a stage now."""
    with _repository() as repository:
        return not repository.status(targets=[stage])


def push_paths(paths: Sequence[str], root: Path = HERE) -> None:
    """Push what DVC keeps at ``paths``; RuntimeError where that fails, after DVC has said why."""
    _transfer("push", paths, root)


def pull_paths(paths: Sequence[str], root: Path = HERE) -> None:
    """Pull what DVC keeps at ``paths``; RuntimeError where that fails, after DVC has said why."""
    _transfer("pull", paths and ["--force", *paths], root)


def push_stage(stage: str, root: Path) -> None:
    """Push what a stage has made, and DVC's memory of its run."""
    _transfer("push", ["--run-cache", stage], root)


def _transfer(verb: str, arguments: Sequence[str], root: Path) -> None:
    command = ["tasks.version", "--cd", str(root.absolute()), verb, *arguments]
    if arguments and supervise(command, {}):
        raise RuntimeError(f"dvc {verb} failed in {root.absolute()}")


def take_over(stage: str, entry: Mapping[str, Any], files: Mapping[str, str]) -> None:
    """Have what a stage made elsewhere as if it had run here.

    ``entry`` is what dvc.lock says of it there, ``files`` the text of its outs that git keeps; the
    others are pulled. Raises RuntimeError where it was made from something else than lies here.
    """
    from dvc.utils.serialize import modify_yaml

    for path, text in files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    with modify_yaml("dvc.lock") as locks:
        locks.setdefault("schema", "2.0")
        locks.setdefault("stages", {})[stage] = dict(entry)
    pull_paths(belongings(stage).cached)
    if not is_done(stage):
        raise RuntimeError(
            f"{stage} was run elsewhere from something else than lies here: `dvc status {stage}` "
            "tells what"
        )


# ---------------------------------------------------------------- a run's commit


def kept_in_git(recipe: str, root: Path) -> list[str]:
    """What a run leaves for git: dvc.lock, the recipe, and the outs that DVC does not cache."""
    with _repository(root) as repository:
        outs = [
            Path(out.fs_path).relative_to(root.absolute()).as_posix()
            for stage in repository.index.stages
            if _name(stage).endswith(f"@{recipe}")
            for out in stage.outs
            if not out.use_cache
        ]
    return ["dvc.lock", f"params/{recipe}.yaml", *sorted(outs)]


def with_digest(file: str, digest: str, commit: str) -> bytes | None:
    """What a file was when DVC gave it this digest, or None where neither place has it.

    It is looked for in the history up to ``commit`` and in DVC's cache.
    """
    if found := commits.with_digest(file, digest, commit):
        return found
    with _repository() as repository:
        cached = Path(repository.cache.local.oid_to_path(digest))
    return cached.read_bytes() if cached.is_file() else None


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


def open_objects() -> dict[Path, bool]:
    """Files of this checkout's own cache that an edit of an out in place would change.

    DVC links outs to its cache and takes the permission to write from both; these have it. The
    value is whether the content is still the one that the file is named after.
    """
    with _repository() as repository:
        cache = Path(repository.cache.local_cache_dir)
    if not cache.resolve().is_relative_to(Path.cwd()):
        return {}
    found = sorted(cache.glob("files/md5/[0-9a-f][0-9a-f]/*"))
    return {file: _is_intact(file) for file in found if _is_object(file) and _is_writable(file)}


def close_object(file: Path) -> None:
    """Take the permission to write from a file of the cache, or drop one that was changed."""
    if _is_intact(file):
        file.chmod(0o444)
    else:
        file.unlink()


def _is_object(file: Path) -> bool:
    return re.fullmatch(r"[0-9a-f]{30}(\.dir)?", file.name) is not None


def _is_writable(file: Path) -> bool:
    return bool(file.stat().st_mode & 0o222)


def _is_intact(file: Path) -> bool:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "md5").hexdigest()
    return digest == file.parent.name + file.stem


def edited_outs() -> list[str]:
    """Outs that stages edit in place (``persist: true``) though DVC links outs to its cache."""
    with _repository() as repository:
        if not set(repository.config["cache"].get("type", [])) & {"hardlink", "symlink"}:
            return []
        return sorted({str(out) for out in repository.index.outs if out.persist})


def copy_outs() -> None:
    """Have DVC copy outs in this checkout, where it cannot clone them, and never link them."""
    edited = edited_outs()
    with _repository() as repository, repository.config.edit("local") as local:
        local.setdefault("cache", {})["type"] = ["reflink", "copy"]
    linked = [out for out in edited if Path(out).exists()]
    with _repository() as repository:
        repository.checkout(targets=linked, relink=True, force=True)


if __name__ == "__main__":
    sys.exit(_dvc(sys.argv[1:]))

"""Transfer sources and outs between checkouts: worktrees, other workers and DVC's remote."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.host import files
from flows.runs import bounded_yaml, cache, git
from flows.runs.dvc_command import DIGEST, HERE, dvc_quietly, modified, open_repository, supervise
from flows.runs.pipeline import belongings, is_done, locked, stages
from params.schema.champion import Champion
from params.whole_file import whole_file

NOT_IN_CACHE = "Checkout failed for following targets"  # what DVC says of missing files alone

# ---------------------------------------------------------------- other checkouts


def share(worktree: Path) -> None:
    """Give ``worktree`` this project's DVC settings, remotes and cache; those of its commit go.

    They are written to its config.local, with paths that are valid there. Only this user may read
    the file, because remotes may have passwords. Raises ValueError where the commit has a link in
    the way.
    """
    from dvc.config import Config

    folder = worktree.absolute() / ".dvc"
    if folder.is_symlink() or not folder.is_dir():
        raise ValueError(f"{folder} is no folder: DVC's settings of this project belong there")
    _set_aside(folder / Config.CONFIG)
    local = folder / Config.CONFIG_LOCAL
    files.remove(local)
    os.close(os.open(local, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    with open_repository() as here, Config(str(folder)).edit("local") as settings:
        settings.update(here.config.load_config_to_level())
        settings.setdefault("cache", {})["dir"] = here.cache.local_cache_dir


def _set_aside(config: Path) -> None:
    """Empty a commit's settings of DVC if they are not those of this checkout.

    Some name folders that DVC writes to, and commands that it calls. git is told not to see it.
    """
    here = Path(".dvc", config.name)
    regular = config.is_file() and not config.is_symlink() and here.is_file()
    if regular and config.read_bytes() == here.read_bytes():
        return
    files.remove(config)
    config.write_text("# config.local has the settings of the checkout that made this worktree\n")
    git.leave_out(f".dvc/{config.name}", config.parent.parent)


def forget_runs(worktree: Path) -> None:
    """Hide DVC's run-cache and the remote from a worktree that shares this project's cache.

    All stages then run anew. Cached files remain readable.
    """
    cache_folder = worktree.absolute() / ".beamline" / "cache"
    cache_folder.mkdir(parents=True)
    with open_repository() as here, open_repository(worktree) as there:
        shared = Path(here.cache.local_cache_dir, "files")
        shared.mkdir(parents=True, exist_ok=True)
        (cache_folder / "files").symlink_to(shared)  # without the run-cache, which lies beside it
        with there.config.edit("local") as local:
            local["cache"]["dir"] = str(cache_folder)
            local.setdefault("core", {})["remote"] = ""


def default_remote(root: Path = HERE) -> str | None:
    """Return the name of DVC's default remote, or None."""
    with open_repository(root) as repository:
        return repository.config["core"].get("remote") or None


def provide_sources(worktree: Path, *named: str) -> None:
    """Check out what .dvc files track, and the outs that the cache has, in a worktree.

    ``named``: stages whose outs are needed, too. Raises RuntimeError where a tracked file is in
    neither cache nor remote.
    """
    dvc_quietly(worktree, "checkout", "--force", "--allow-missing")
    with open_repository(worktree) as repository:
        needed = [
            stage
            for stage in repository.index.stages
            if stage.is_data_source or getattr(stage, "name", None) in named
        ]
        lacking = [each for each in needed if not all(Path(o.fs_path).exists() for o in each.outs)]
        targets = [
            str(Path(each.path).relative_to(worktree.absolute()))
            if each.is_data_source
            else each.name
            for each in lacking
        ]
    if targets:
        _pull_run(worktree, *targets)


def provide_inputs(recipe: str, worktree: Path, restored: Path) -> None:
    """Have all that a run reads, and has not made, where a worktree finds it without a remote.

    These are the files that .dvc files track, outs of other recipes that the recipe names, and the
    champion that it was compared with; the worktree's dvc.lock is left with those outs alone.
    ``restored`` has the outs of the run. Raises RuntimeError with what is in neither cache nor
    remote.
    """
    settings = _settings(whole_file(recipe, worktree / "params"))
    texts = {posixpath.normpath(text) for text in _texts(settings) if "/" in text}
    stages = {
        name: entry
        for name, entry in locked(worktree).items()
        if not name.endswith(f"@{recipe}") and _makes_one_of(entry, texts)
    }
    (worktree / "dvc.lock").unlink()
    if stages:
        with modified(worktree / "dvc.lock") as lock:
            lock.update({"schema": "2.0", "stages": stages})
    provide_sources(worktree, *stages)
    if champion := settings.get("champion"):
        pinned = Champion.model_validate(champion)
        _provide_champion(pinned, restored / f"models/{recipe}/champion/policy")


def _settings(file: Path) -> Mapping[str, Any]:
    """Return the values of a recipe, whose version of the schema may be another one."""
    try:
        values = bounded_yaml.load(file.read_text(), str(file))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    return values if isinstance(values, Mapping) else {}


def _texts(value: Any) -> Iterator[str]:
    """Yield each text in the values of a recipe."""
    parts = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, str):
        yield value
    elif isinstance(parts, Iterable):
        for part in parts:
            yield from _texts(part)


def _makes_one_of(entry: Mapping[str, Any], texts: Collection[str]) -> bool:
    """Return whether a stage of dvc.lock has an out at, above or below one of these paths."""
    outs = [Path(out["path"]) for out in entry.get("outs", [])]
    return any(
        out.is_relative_to(text) or Path(text).is_relative_to(out) for out in outs for text in texts
    )


def _provide_champion(champion: Champion, restored: Path) -> None:
    """Bring a champion's folder into DVC's cache, by its digest.

    A champion that was registered by hand is in no remote as a folder, but the run has a copy of
    its files.
    """
    try:
        cache.fetch(champion.digest)
    except ValueError as error:
        if restored.is_dir() and cache.keep(restored) == champion.digest:
            return
        raise RuntimeError(
            f"the champion that the run was compared with, version {champion.version} of commit "
            f"{champion.commit}: {error}"
        ) from None


def restore_run(recipe: str, worktree: Path) -> None:
    """Restore the outs of a recipe's stages in dvc.lock in a worktree, from cache or remote.

    With a remote, DVC's run-cache is pulled too. Raises RuntimeError where something is in neither,
    where DVC cannot restore it for another reason, and where dvc.lock lacks a stage.
    """
    names, entries = [stage.name for stage in stages(recipe, worktree)], locked(worktree)
    if lacking := [name for name in names if name not in entries]:
        raise RuntimeError(
            f"{worktree / 'dvc.lock'} has no {', '.join(lacking)}: the run of {recipe} has not "
            "ended, or is not committed with it"
        )
    targets = ["--with-deps", *names]
    reason = dvc_quietly(worktree, "checkout", "--force", *targets)
    if reason and NOT_IN_CACHE not in reason:
        raise RuntimeError(f"DVC cannot restore {recipe} in {worktree}: {reason}")
    if reason:
        _pull_run(worktree, "--run-cache", "--force", *targets)


def _pull_run(worktree: Path, *targets: str) -> None:
    if default_remote(worktree) is None:
        raise RuntimeError(
            f"{', '.join(t for t in targets if not t.startswith('-'))}: not all of it is in DVC's "
            "cache here, and there is no default remote to pull it from: `dvc remote add --default`"
        )
    if supervise(
        ["flows.runs.dvc_command", "--cd", str(worktree.absolute()), "pull", *targets], {}
    ):
        raise RuntimeError(f"dvc pull failed in {worktree}")


def push(recipe: str, worktree: Path) -> None:
    """Push the outs of a worktree's run and the run-cache, where a default remote is set.

    Raises RuntimeError where that fails; DVC has printed the reason.
    """
    if default_remote(worktree) is None:
        return
    targets = ["--run-cache", "--with-deps", *(stage.name for stage in stages(recipe, worktree))]
    if supervise(
        ["flows.runs.dvc_command", "--cd", str(worktree.absolute()), "push", *targets], {}
    ):
        raise RuntimeError("dvc push failed")


def push_paths(paths: Sequence[str], root: Path = HERE) -> None:
    """Push cached ``paths``; RuntimeError where that fails, after DVC has printed the reason."""
    _transfer("push", paths, root)


def pull_paths(paths: Sequence[str], root: Path = HERE) -> None:
    """Pull cached ``paths``; RuntimeError where that fails, after DVC has printed the reason."""
    _transfer("pull", paths and ["--force", *paths], root)


def push_stage(stage: str, root: Path) -> None:
    """Push the outs of a stage and the run-cache."""
    _transfer("push", ["--run-cache", stage], root)


def _transfer(verb: str, arguments: Sequence[str], root: Path) -> None:
    command = ["flows.runs.dvc_command", "--cd", str(root.absolute()), verb, *arguments]
    if arguments and supervise(command, {}):
        raise RuntimeError(f"dvc {verb} failed in {root.absolute()}")


def take_over(stage: str, entry: Mapping[str, Any], files: Mapping[str, str]) -> None:
    """Record a stage that ran elsewhere as if it had run here.

    ``entry``: its entry in the dvc.lock of that checkout; ``files``: path -> text of the outs that
    git keeps. The other outs are pulled. Raises RuntimeError where its inputs differ from those
    here.
    """
    if odd := [out for out in entry.get("outs", []) if not DIGEST.fullmatch(str(out.get("md5")))]:
        raise RuntimeError(f"{stage} ran elsewhere and has an out without a digest: {odd[0]!r}")
    for path, text in files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    with modified("dvc.lock") as locks:
        locks.setdefault("schema", "2.0")
        locks.setdefault("stages", {})[stage] = dict(entry)
    pull_paths(belongings(stage).cached)
    if not is_done(stage):
        raise RuntimeError(
            f"{stage} ran elsewhere with other inputs than those here: `dvc status {stage}` lists "
            "them"
        )

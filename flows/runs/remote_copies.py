"""Push to DVC's default remote what it lacks of the runs that are here.

Each run is pushed when it ends. A remote that was added or changed later, has lost files, or whose
push was interrupted, lacks some of them. What a run needs is listed by digest, from its commit
alone: the outs of its stages, the champion that it was compared with, and what .dvc files track.
``.beamline/pushed.json`` remembers which remote has which runs, so that a call with nothing to push
asks for the files of the newest run alone; ``missing`` asks for all.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.host import files
from flows.host.addresses import address_without_password
from flows.host.plain_reasons import plain_reason
from flows.runs import cache, dvc_settings, git, ledger_mirror
from flows.runs.dvc_command import DIGEST, open_repository
from flows.runs.pipeline import recipe_values
from params.schema.base import SOURCES

PUSHED = Path(".beamline/pushed.json")  # address of a remote -> keys of the runs that it has
MOST_KEYS = 10_000  # of a remote: some 500 kB; older ones are looked up again


@dataclass(frozen=True)
class RunFiles:
    """A run's branch, and DVC's digests of what it needs."""

    branch: str
    digests: set[str]


@dataclass(frozen=True)
class Missing:
    """What a remote lacks: DVC's digests, and the runs that they belong to."""

    remote: str
    digests: frozenset[str]
    runs: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {len(self.runs) - 3} more" if self.runs[3:] else ""
        runs = ", ".join(self.runs[:3]) + more
        return f"{len(self.digests)} files of {runs} that the remote '{self.remote}' lacks"


# ---------------------------------------------------------------- what runs need


def needed(commit: str, recipe: str) -> set[str]:
    """Return DVC's digests of what the run of a recipe at a commit needs; folders by their own.

    Empty for a commit that is no run.
    """
    try:
        return set(_needed(git.locked_at(commit), commit, recipe))
    except (ValueError, AttributeError, TypeError, KeyError):
        return set()


def _needed(locked: Mapping[str, Any], commit: str, recipe: str) -> Iterator[str]:
    stages = {name: entry for name, entry in locked.items() if name.endswith(f"@{recipe}")}
    in_git = git.files_at(commit, "reports")
    outs = [out for stage in stages.values() for out in stage.get("outs", [])]
    digests = {out.get("md5") for out in outs if out["path"] not in in_git}
    for stage in stages.values() if digests else ():
        values = recipe_values(stage, recipe)
        digests.add((values.get("champion") or {}).get("digest"))
    digests |= set(_tracked(commit) if digests else ())
    yield from (str(digest) for digest in digests if DIGEST.fullmatch(str(digest)))


def _tracked(commit: str) -> Iterator[str]:
    """Yield the digests in the .dvc files of a commit's sources."""
    for file in git.files_at(commit, SOURCES.as_posix()):
        if file.endswith(".dvc"):
            for out in (git.yaml_at(commit, file) or {}).get("outs", []):
                yield out["md5"]


def _recipes(commit: str) -> list[str]:
    try:
        return git.recipes_at(commit)
    except ValueError:  # no run, whatever its branch is called
        return []


def _runs(recipe: str, known: Collection[str] = ()) -> dict[str, RunFiles]:
    """Return the runs of a recipe, or of "*", by a key; without those whose key is ``known``.

    The newest is never left out: a remote that has lost files most likely lacks some of its. The
    last commit of the checkout counts as a run, too, where it has the outs of one.
    """
    commits = git.commits_of_runs(recipe)
    newest = next(reversed(commits.values()), None)
    if head := git.revision().commit:
        commits["HEAD"] = head
    runs: dict[str, RunFiles] = {}
    for branch, commit in commits.items():
        for name in _recipes(commit) if recipe == "*" else [recipe]:
            key = f"{commit} {name}"
            if key not in runs and (key not in known or commit == newest):
                runs[key] = RunFiles(branch, needed(commit, name))
    return runs


# ---------------------------------------------------------------- what a remote lacks


class RemoteError(RuntimeError):
    """DVC's remote cannot be used: the runs are not pushed."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the runs are not pushed: {what}. They are in DVC's cache here; beamline doctor --yes "
            "pushes them once the remote can be used"
        )


@contextmanager
def _opened() -> Iterator[tuple[Any, Any]]:
    """Yield DVC's repository, and what it has of the default remote.

    Raises RemoteError where that cannot be reached or used.
    """
    if fault := dvc_settings.unknown_default():
        raise RemoteError(fault)
    with open_repository() as repository:
        name = repository.config["core"]["remote"]
        try:
            yield repository, repository.cloud.get_remote_odb(name)
        except RemoteError:
            raise
        except Exception as error:  # filesystems raise all kinds
            address = address_without_password(repository.config["remote"][name]["url"])
            raise RemoteError(
                f"DVC's remote '{name}' cannot be used ({address}: {plain_reason(error)})"
            ) from None


def missing(recipe: str = "*") -> Missing | None:
    """Return what the default remote lacks of the runs whose files are here; None if nothing.

    ``recipe``: or "*" for every one. Asks the remote for each file. Raises RuntimeError where it
    cannot be reached.
    """
    if not cache.default_store():
        return None
    with _opened() as (repository, remote):
        return _missing(repository, remote, _runs(recipe))


def _missing(repository: Any, remote: Any, runs: dict[str, RunFiles]) -> Missing | None:
    files_of = [(run.branch, _files(repository, run.digests)) for run in runs.values()]
    every: set[str] = set().union(*(digests for _, digests in files_of))
    lacking = every - set(remote.oids_exist(sorted(every))) if every else set()
    if not lacking:
        return None
    concerned = dict.fromkeys(branch for branch, digests in files_of if digests & lacking)
    name = repository.config["core"]["remote"]
    return Missing(name, frozenset(lacking), tuple(concerned))


def _files(repository: Any, digests: set[str]) -> set[str]:
    """Return those of the digests that the cache has, with those of the files in its folders."""
    from dvc_data.hashfile import load
    from dvc_data.hashfile.hash_info import HashInfo

    local = repository.cache.local
    present = {digest for digest in digests if local.exists(digest)}
    folders: list[Any] = [
        load(local, HashInfo("md5", each)) for each in present if each.endswith(".dir")
    ]
    inside = {info.value for folder in folders for _, _, info in folder}
    return present | {digest for digest in inside if local.exists(digest)}


def push_missing(recipe: str = "*", *, ask: bool = False) -> None:
    """Push what the default remote lacks of a recipe's runs, and what the ledger's mirror lacks.

    ``ask``: ask the remote also for what it is remembered to have. Nothing happens without a
    remote. Raises RuntimeError where it cannot be reached.
    """
    ledger_mirror.send_missing(recipe)
    if not cache.default_store():
        return
    with _opened() as (repository, remote):
        address = address_without_password(remote.fs.unstrip_protocol(remote.path))
        runs = _runs(recipe, () if ask else _read().get(address, []))
        if lacking := _missing(repository, remote, runs) if runs else None:
            print(f"pushing {lacking}", flush=True)
            _push(repository, remote, lacking.digests)
        _remember(address, list(runs))


def _push(repository: Any, remote: Any, digests: frozenset[str]) -> None:
    """Send files, those in folders before the folders' lists, so that a list means all of it."""
    from dvc_data.hashfile.hash_info import HashInfo

    local = repository.cache.local
    for folders in (False, True):
        infos = {HashInfo("md5", each) for each in digests if each.endswith(".dir") == folders}
        with _collected() as errors:
            sent = repository.cloud.transfer(local, remote, infos, cache_odb=local, shallow=True)
        if sent.failed:
            name = repository.config["core"]["remote"]
            address = address_without_password(remote.fs.unstrip_protocol(remote.path))
            reason = plain_reason(errors[0]) if errors else "DVC gives no reason"
            raise RemoteError(
                f"DVC's remote '{name}' ({address}) has not taken {len(sent.failed)} of "
                f"{len(digests)} files ({reason})"
            )
    repository.stage_cache.push(None)


@contextmanager
def _collected() -> Iterator[list[BaseException]]:
    """Yield a list of why files were not sent; DVC would print a line for each of them."""
    errors: list[BaseException] = []

    def collect(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1]:
            errors.append(record.exc_info[1])
        return False

    logger = logging.getLogger("dvc_data.hashfile.transfer")
    logger.addFilter(collect)
    try:
        yield errors
    finally:
        logger.removeFilter(collect)


# ---------------------------------------------------------------- what is remembered


def _read() -> dict[str, list[str]]:
    try:
        return dict(json.loads(PUSHED.read_text()))
    except (OSError, ValueError):
        return {}


def _remember(address: str, keys: Sequence[str]) -> None:
    remembered = _read()
    known = remembered.get(address, [])
    added = [key for key in keys if key not in known]
    if added:
        PUSHED.parent.mkdir(parents=True, exist_ok=True)
        with files.replaced(PUSHED) as partial:
            partial.write_text(json.dumps({**remembered, address: [*known, *added][-MOST_KEYS:]}))

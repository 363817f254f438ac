"""Find what a user asks to trace: a result, checkpoint, dataset or file, and the run that made it.

``find`` returns it as a Subject, ``restore`` a copy of it. What a run made is read from its
dvc.lock, so neither needs a checkout of that run.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flows.host import files
from flows.host.addresses import address_without_password
from flows.runs import cache, earlier_outs, git, pipeline
from flows.runs.commit_check import is_inside
from flows.tracking import run as track
from flows.tracking import store

SHORT = 12  # characters of a commit in a command
LARGEST = 2**24  # bytes of a text that a run commits; metrics have some 10 kB
HOME = Path(".beamline/lineage")  # restored copies
AGENTS = {"cold start": "cold_start", "trained": "trained", "champion": "champion"}
FORMS = """WHAT is
  a metric  reports/<recipe>/metrics.json:success.trained.mean, or success.trained.mean alone
  a model   <recipe>@champion or another alias, <recipe>/<version>
  a file    models/<recipe>/trained or another out of a stage, a file in one, a copy elsewhere"""


@dataclass(frozen=True)
class State:
    """The content of dvc.lock at a commit, or in this checkout if ``commit`` is empty."""

    lock: Mapping[str, Any]
    commit: str = ""
    branch: str = ""

    def outs(self) -> dict[str, tuple[str, str]]:
        """Return path of each out -> its digest, and the stage that made it."""
        return {
            out["path"]: (out["md5"], stage)
            for stage, entry in self.lock.items()
            for out in entry.get("outs", [])
        }

    def recipes(self) -> list[str]:
        """List the recipes that have run."""
        return sorted({stage.rpartition("@")[2] for stage in self.lock})


@dataclass(frozen=True)
class Subject:
    """What is asked for: an out of a run, or something in it."""

    state: State
    path: str
    digest: str
    out: str  # the path itself, or the folder that it lies in
    metric: str = ""  # "success.trained.mean = 0.844"
    agent: str = "trained"  # whose metric it is
    facts: Sequence[str] = ()
    iteration: int | None = None  # None: the one that made the evaluated policy
    every: bool = False  # the ids of all questions

    @property
    def stage(self) -> str:
        """The stage that made it."""
        return self.state.outs()[self.out][1]

    @property
    def recipe(self) -> str:
        """The recipe of that stage."""
        return self.stage.rpartition("@")[2]


def find(what: str, revision: str | None = None, recipe: str | None = None) -> Subject:
    """Find what ``what`` names at ``revision``, by default in this checkout and the newest runs.

    Where several runs made the same from the same inputs, the oldest one is returned. Raises
    ValueError for what is not found, ConnectionError for a model whose registry is unreachable.
    """
    if model := re.fullmatch(r"([\w.-]+)(?:@([\w.-]+)|/(\d+))", what):
        return _model(what, model[1], model[2] or model[3])
    metric = re.fullmatch(r"(.+\.json):(.+)", what)
    path = Path(metric[1] if metric else what)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    states = list(_states(revision))
    subject = _lookup(path.as_posix(), metric and metric[2], states)
    if subject is None and path.exists():
        subject = _stray(path, states)
    if subject is None and "/" not in what:
        subject = _short_metric(what, states, recipe)
    if subject is None:
        outs = dict.fromkeys(out for state in states for out in state.outs())
        near = difflib.get_close_matches(path.as_posix(), outs)
        guess = f"near it: {', '.join(near)}\n" if near else ""
        none = "" if states else ": there is no dvc.lock here, and no run's branch"
        raise ValueError(f"'{what}' is nothing that a run has made{none}\n{guess}{FORMS}")
    return subject if revision else _first_made(subject)


def _states(revision: str | None) -> Iterator[State]:
    """Yield the states to search, in this order."""
    if revision:
        yield _at_commit(revision)
        return
    if here := pipeline.locked():
        commit = git.revision().commit if git.committed("dvc.lock") else ""
        same = commit and git.locked_at(commit) == here
        yield _at_commit(commit) if same else State(here)
    for branch in git.runs("*"):
        with suppress(ValueError):  # no branch of a run
            yield _at_commit(branch)


def _at_commit(revision: str) -> State:
    commit = git.resolve(revision)
    branches = git.branches_at(commit)
    branch = revision if revision in branches else next(iter(branches), "")
    return State(git.locked_at(commit), commit, branch)


def _lookup(path: str, metric: str | None, states: Sequence[State]) -> Subject | None:
    """Find a path, or a metric in that file, in the first state that has it."""
    subject = next(filter(None, (path_at(path, state) for state in states)), None)
    return _measured(subject, metric) if subject and metric else subject


def path_at(path: str, state: State) -> Subject | None:
    """Find a path in a state; None where it is no out and in none."""
    outs = state.outs()
    out = max((o for o in outs if Path(path).is_relative_to(o)), key=len, default="")
    digest = outs[out][0] if out else None
    if digest and path != out:
        digest = cache.kept_folder(digest).get(Path(path).relative_to(out).as_posix())
    if digest is None:
        return None
    if not state.commit and Path(path).exists() and cache.digest_of(Path(path)) != digest:
        raise ValueError(
            f"{path} is not what dvc.lock says ({digest}): it was changed after the run; "
            f"`dvc checkout {shlex.quote(path)}` brings it back, --at REV asks for another run's"
        )
    return Subject(state, path, digest, out)


def _first_made(subject: Subject) -> Subject:
    """Return the same out of the oldest run that made it from the same inputs."""
    runs = [_at_commit(branch) for branch in git.runs_with(subject.state.outs()[subject.out][0])]
    same = [run for run in runs if run.lock.get(subject.stage) == subject.state.lock[subject.stage]]
    others = ", ".join(run.branch for run in same[1:])
    facts = [f"the same in {len(same) - 1} later runs: {others}"] if others else []
    return replace(subject, state=[*same, subject.state][0], facts=facts)


def _model(what: str, model: str, which: str) -> Subject:
    tags = store.version_tags(model, which)
    if tags is None:
        raise ValueError(f"the model registry {store_address()} has no '{what}'\n{FORMS}")
    commit, number = tags.get(track.COMMIT), tags["version"]
    if not commit:
        raise ValueError(
            f"version {number} of {model} was registered by hand, not by a run: its files are "
            f"DVC's {tags.get(track.DIGEST)}"
        )
    subject = path_at(f"models/{model}/trained", _at_commit(commit))
    if subject is None:
        raise ValueError(f"commit {commit} has no models/{model}/trained in its dvc.lock")
    return replace(subject, facts=[f"version {number} of the model {model} in {store_address()}"])


def _measured(subject: Subject, key: str) -> Subject:
    """Add the value of a metric of the file; ValueError where the file has no such metric."""
    path, text = subject.path, text_of(subject.state, subject.path)
    try:
        values = track.flatten(json.loads(text))
    except (ValueError, AttributeError, RecursionError):
        where = f" of commit {subject.state.commit}" if subject.state.commit else ""
        raise ValueError(f"{path}{where} is no JSON with values by name, as a run writes") from None
    if key not in values:
        near = ", ".join(difflib.get_close_matches(key, values, cutoff=0.4))
        raise ValueError(f"{path} has no metric '{key}'" + (f"; near it: {near}" if near else ""))
    agent = next((a for name, a in AGENTS.items() if f".{name}." in key), "trained")
    return replace(subject, metric=f"{key} = {values[key]}", agent=agent)


def _short_metric(key: str, states: Sequence[State], recipe: str | None) -> Subject | None:
    """Find a metric without its file, in the one recipe that has it."""
    subjects, faults = [], []
    for name in [recipe] if recipe else sorted({r for state in states for r in state.recipes()}):
        try:
            subjects.append(_lookup(f"reports/{name}/metrics.json", key, states))
        except ValueError as fault:
            faults.append(str(fault))
    known = [subject for subject in subjects if subject]
    if len(known) > 1:
        recipes = ", ".join(subject.recipe for subject in known)
        raise ValueError(f"'{key}' is a metric of {recipes}: say which, --recipe")
    if faults and not known:
        raise ValueError("\n".join([*faults, FORMS]))
    return known[0] if known else None


def _stray(path: Path, states: Sequence[State]) -> Subject:
    """Find a file or folder that is no out by its digest, in the oldest run that has it."""
    digest = cache.digest_of(path)
    committed = [state for state in states[::-1] if state.commit]  # the oldest first
    for state in [*committed, *(state for state in states if not state.commit)]:
        for out, (out_digest, _) in state.outs().items():
            inside = folder_files(out_digest) if out_digest.endswith(".dir") else {}
            names = {out_digest: out} | {md5: f"{out}/{name}" for name, md5 in inside.items()}
            if digest in names:
                return Subject(state, names[digest], digest, out)
    raise ValueError(f"{path} has the digest {digest}, which no run has made\n{FORMS}")


@functools.cache
def folder_files(digest: str) -> dict[str, str]:
    try:
        return cache.kept_folder(digest)
    except ValueError:  # neither cache nor remote has it
        return {}


def restore(subject: Subject) -> Path:
    """Restore what is asked for as a copy below HOME; return its path.

    It comes from git, from DVC's cache, or from its remote. Raises ValueError where none of them
    has it with its digest.
    """
    commit = subject.state.commit
    if not commit:
        raise ValueError(f"{subject.path} is in this checkout, as far as its run is kept at all")
    if not is_inside(subject.path) or Path(subject.path) == Path():
        raise ValueError(f"commit {commit} has the out {subject.path}, which is no path in a run")
    target = HOME / commit[:SHORT] / subject.path
    if target.exists() and cache.digest_of(target) == subject.digest:
        return target
    files.remove(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with files.replaced(target) as partial:
        if git.committed(subject.path, at=commit):
            partial.write_text(git.content(commit, subject.path))
        else:
            cache.restore(subject.digest, partial)
        if cache.digest_of(partial) != subject.digest:
            raise ValueError(f"commit {commit} has another {subject.path} than its run has made")
    return target


def text_of(state: State, path: str) -> str:
    """Return a file that git keeps of a run, or that is in this checkout."""
    if state.commit:
        if (size := git.size(state.commit, path) or 0) > LARGEST:
            raise ValueError(
                f"{path} of commit {state.commit} has {size} bytes: at most {LARGEST} are read"
            )
        return git.content(state.commit, path)
    if path in earlier_outs.waiting(Path()):
        raise ValueError(
            f"{path} waits beside its place since a stage was killed: make run or beamline doctor "
            "puts it back"
        )
    if not Path(path).is_file():
        raise ValueError(f"{path} is gone from this checkout, and no commit has it: run again")
    return Path(path).read_text()


def store_address() -> str:
    """Return the address of MLflow's store, relative to the current folder if it is below it."""
    return address_without_password(store.store_uri()).replace(
        f"sqlite:///{Path.cwd()}/", "sqlite:///"
    )

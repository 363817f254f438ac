"""The links of a chain: what each shows, and the command that restores or shows it.

Digests beside a path are DVC's, those of sub-steps the ledger's.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.runs import git
from flows.runs.pipeline import recipe_paths
from flows.runs.provenance_subject import SHORT, State, Subject, path_at, store_address, text_of
from flows.tracking import store
from flows.tracking.run import OUTS

WIDTH = 110  # characters of a line
OUT_TAG = "dvc."  # begins the tags of older runs that name their outs
KEPT = (
    "params",
    "params.yaml",
    "data/sources",
    "dvc.yaml",
    "dvc.lock",
)  # committed with the reports


@dataclass(frozen=True)
class Link:
    """One thing on the way from a result to the commit that restores it."""

    what: str  # "checkpoint"
    name: str = ""  # "success.trained.mean = 0.844"
    digest: str = ""
    where: str = ""
    facts: Sequence[str] = ()
    command: str = ""  # shell command that restores or shows it

    def __str__(self) -> str:
        lines = ["  ".join(filter(None, [self.where, self.digest])), *self.facts]
        wrapped = [row for line in lines for row in textwrap.wrap(line, WIDTH)]
        wrapped += [f"$ {self.command}"] if self.command else []
        name = " ".join(self.name.split())  # a metric may be a text of several lines
        title = f"{self.what}: {name}" if name else self.what
        return "\n".join([title, *(f"    {line}" for line in wrapped)])


def out_link(
    subject: Subject, what: str, path: str, name: str = "", facts: Sequence[str] = ()
) -> Link:
    """Return the link of an out of the run, or of something in one."""
    out = subject if path == subject.path else path_at(path, subject.state)
    if out is None:
        return Link(what, name or "no out of this run", "", path, facts)
    return Link(what, name, out.digest, path, facts, _restoring(subject.state, path))


def _restoring(state: State, path: str) -> str:
    """Return the command that restores an out, or a file in one; empty for what is only here.

    Not ``dvc get``: it links to the cache, and with --force it then empties the linked file.
    """
    name = shlex.quote(path)
    if state.commit:
        return f"beamline lineage {name} --at {state.commit[:SHORT]} --restore"
    return f"dvc checkout {name}" if path.startswith(("data/", "models/")) else ""


# ---------------------------------------------------------------- the end of a chain


def commit_link(subject: Subject) -> Link:
    """Return the run's commit, or how to commit what only this checkout has."""
    state, recipe = subject.state, subject.recipe
    if not state.commit:
        paths = [path for path in (*KEPT, f"reports/{recipe}") if Path(path).exists()]
        keep = f"git add {' '.join(paths)} && git commit --message 'Run of {recipe}'"
        here = git.revision()
        changed = ", with changes that are in no commit" if here.dirty else ""
        facts = [f"code: {here.commit}{changed}", "all outs are in this checkout; to keep them:"]
        return Link("commit", "not committed", facts=facts, command=keep)
    code = git.trailer(state.commit, "Code")
    facts = [f"code: {code}"] if code else []
    return Link("commit", state.branch, state.commit, facts=facts, command=reproducing(subject))


def reproducing(subject: Subject) -> str:
    """Return the command that restores the whole run; "" for one that is in no commit."""
    state = subject.state
    return reproducing_commit(subject.recipe, state.commit, state.branch) if state.commit else ""


def reproducing_commit(recipe: str, commit: str, branch: str = "") -> str:
    """Return the command that restores the run of a commit, its inputs included."""
    named = git.trailer(commit, "Recipe") == recipe or len(git.recipes_at(commit)) == 1
    revision = shlex.quote(branch or commit[:SHORT])
    return f"beamline reproduce {revision}" + ("" if named else f" --recipe {recipe}")


def parameters_link(subject: Subject) -> Link:
    """Return the recipe of the run, with what was set for it alone."""
    commit = subject.state.commit
    own, whole = recipe_paths(subject.recipe)
    has_base = git.committed(whole, at=commit) if commit else Path(whole).exists()
    path = whole if has_base else own
    text = text_of(subject.state, path)
    command = f"git show {commit[:SHORT]}:{path}" if commit else f"cat {path}"
    changes = git.trailer(commit, "Set").splitlines() if commit else []
    digest = hashlib.md5(text.encode()).hexdigest()
    return Link("parameters", "", digest, path, [f"set: {each}" for each in changes], command)


def tracked_link(subject: Subject) -> Link:
    """Return the oldest MLflow run with this out, of those that share most other outs."""
    digests = {path: digest for path, (digest, _) in subject.state.outs().items()}
    try:
        runs = tracked_runs(subject.recipe, subject.out, digests[subject.out])
        if not runs:
            return Link("MLflow run", f"not found in {store_address()}")
        run, _ = max(runs, key=lambda found: len(digests.items() & found[1].items()))
        stages = store.runs_tagged(store.PARENT_RUN, run["id"])
    except ConnectionError as error:
        return Link("MLflow run", f"not found: {error}")
    facts = [f"{stage['name']}: {stage['id']}" for stage in stages]
    facts += [f"{len(runs) - 1} more with the same digest"] if runs[1:] else []
    describe = f"mlflow runs describe --run-id {run['id']}"
    command = f"env MLFLOW_TRACKING_URI={shlex.quote(store_address())} {describe}"
    return Link("MLflow run", run["name"], run["id"], store_address(), facts, command)


def tracked_runs(recipe: str, out: str, digest: str) -> list[tuple[dict[str, str], dict[str, str]]]:
    """Return tags and outs of the pipelines' runs that have made an out, the oldest first.

    Raises ConnectionError where the store cannot be read.
    """
    older = store.runs_tagged(f"{OUT_TAG}{out}", digest)
    newer = [
        run
        for run in store.runs_tagged("recipe", recipe)
        if run.get(store.KIND_TAG) == store.PIPELINE and f"{OUT_TAG}{out}" not in run
    ]
    found = [(run, _outs_in_tags(run)) for run in older] + [(run, _outs(run)) for run in newer]
    return [(run, outs) for run, outs in found if outs.get(out) == digest]


def _outs(run: Mapping[str, str]) -> dict[str, str]:
    """Return the digest of each out of a pipeline's run; {} for one that has ended before any."""
    return dict(json.loads(store.artifact_text(run["id"], OUTS) or "{}"))


def _outs_in_tags(run: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix(OUT_TAG): digest
        for name, digest in run.items()
        if name.startswith(OUT_TAG)
    }

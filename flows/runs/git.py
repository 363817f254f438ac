"""Read and write git: the checkout's commit, the content of commits, branches of runs, worktrees.

Paths are relative to the current folder, the project's root, or to ``root``, that of another
checkout. What dvc.lock names is read by flows/runs/pipeline.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path()
OF_A_HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
WRITTEN_BY_RUNS = (":!dvc.lock", ":!reports")  # never an input of a run


@dataclass(frozen=True)
class Revision:
    """The commit of a checkout; empty before the first one."""

    commit: str
    dirty: bool


def revision() -> Revision:
    """Return the checkout's commit, and whether anything but outputs of runs differs from it."""
    commit = _git("rev-parse", "--verify", "--quiet", "HEAD")
    changes = _git("status", "--porcelain", "--", ".", *WRITTEN_BY_RUNS)
    return Revision(commit, dirty=not commit or bool(changes))


def is_repository() -> bool:
    """Return whether the checkout is in a git repository, which an unpacked archive is not."""
    return bool(_git("rev-parse", "--git-dir"))


def uncommitted(*besides: str) -> list[str]:
    """List tracked files that differ from the last commit, as ``git status`` prints them.

    Outputs of runs and the paths ``besides`` are left out.
    """
    listed = ("status", "--porcelain", "--untracked-files=no")
    beside = [f":!{path}" for path in besides]
    return _git(*listed, "--", ".", *WRITTEN_BY_RUNS, *beside).splitlines()


def untracked(folder: str) -> list[str]:
    """List the files of a folder that git does not track, ignored ones included.

    Python's compiled files are left out.
    """
    listed = _git("ls-files", "--others", "--", folder, ":!**/__pycache__/**").splitlines()
    return [file for file in listed if not file.endswith(".pyc")]


def committed(path: str, root: Path = HERE, at: str = "HEAD") -> bool:
    """Return whether a commit, by default the last one, has this file or a file in this folder."""
    return bool(_git("ls-tree", "--name-only", at, "--", path, root=root))


def head(root: Path) -> str:
    """Return the commit that a worktree has checked out."""
    return _do_git("rev-parse", "HEAD", root=root)


def resolve(revision: str) -> str:
    """Return the commit of a branch, tag or abbreviated hash; ValueError where there is none."""
    commit = _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if not commit:  # a branch that only a remote of this clone has
        commits = _git("for-each-ref", "--format=%(objectname)", f"refs/remotes/*/{revision}")
        commit = commits.partition("\n")[0]
    if not commit:
        raise ValueError(
            f"'{revision}' names no commit here: `git branch --all --list '*runs/*'` lists the "
            "runs; `git fetch` brings those of others"
        )
    return commit


def trailer(commit: str, key: str) -> str:
    """Return the value of a ``Key: value`` line at the end of a commit's message, or ""."""
    return _git("log", "-1", f"--format=%(trailers:key={key},valueonly)", commit)


def check_identity() -> None:
    """Raise ValueError where git has no name and e-mail address to commit with."""
    if not _git("var", "GIT_COMMITTER_IDENT"):
        raise ValueError(
            "git does not know who commits: git config --global user.name <name>, and user.email"
        )


# ---------------------------------------------------------------- content of commits


def content(commit: str, file: str) -> str:
    """Return a file's text at a commit. Raises ValueError where commit or file is missing."""
    shown = subprocess.run(["git", "show", f"{commit}:{file}"], capture_output=True, text=True)
    if shown.returncode:
        raise ValueError(f"commit {commit} has no {file}: {shown.stderr.strip()}")
    return shown.stdout


def locked_at(commit: str) -> dict[str, Any]:
    """Return the stages of dvc.lock at a commit. Raises ValueError as ``content``."""
    return (yaml.safe_load(content(commit, "dvc.lock")) or {}).get("stages", {})


def digests_at(commit: str, recipe: str) -> dict[str, str]:
    """Return the digest of each out of a recipe's stages at a commit. Raises as ``content``."""
    return {
        out["path"]: out["md5"]
        for name, stage in locked_at(commit).items()
        if name.endswith(f"@{recipe}")
        for out in stage.get("outs", [])
    }


def recipes_at(commit: str) -> list[str]:
    """Return the recipes that have a stage in a commit's dvc.lock."""
    lock = yaml.safe_load(_git("show", f"{commit}:dvc.lock")) or {}
    return sorted({name.rpartition("@")[2] for name in lock.get("stages", {})})


def with_digest(file: str, digest: str, commit: str) -> bytes | None:
    """Return a file's content at the time when its MD5 was ``digest``; None where it never was.

    Searches the history up to ``commit``.
    """
    for older in _git("log", "--format=%H", commit, "--", file).splitlines():
        content = _bytes_at(older, file)
        if hashlib.md5(content).hexdigest() == digest:
            return content
    return None


def folder_with_digest(folder: str, digest: str, commit: str) -> dict[str, bytes] | None:
    """Return the files of a folder when DVC gave it this digest: path in the folder -> content.

    Searches the history up to ``commit``. None where it has no such state, for instance because git
    does not track all of the folder.
    """
    for older in [commit, *_git("log", "--format=%H", commit, "--", folder).splitlines()]:
        names = _git("ls-tree", "-r", "--name-only", "-z", older, "--", folder).split("\0")
        files = {
            str(Path(name).relative_to(folder)): _bytes_at(older, name) for name in names if name
        }
        if _folder_digest(files) == digest:
            return files
    return None


def _bytes_at(commit: str, file: str) -> bytes:
    return subprocess.run(["git", "show", f"{commit}:{file}"], capture_output=True).stdout


def _folder_digest(files: Mapping[str, bytes]) -> str:
    """Compute DVC's digest of a folder: the MD5 of the list of its files, as DVC writes it."""
    listed = [
        {"md5": hashlib.md5(content).hexdigest(), "relpath": path}
        for path, content in sorted(files.items())
    ]
    return hashlib.md5(json.dumps(listed, sort_keys=True).encode()).hexdigest() + ".dir"


# ---------------------------------------------------------------- runs and their branches


def runs(recipe: str) -> list[str]:
    """List the branches of a recipe's runs, the newest first; of every recipe for "*"."""
    return [branch for _, branch in reversed(_runs(recipe))]


def runs_with(digest: str) -> list[str]:
    """List the branches of runs whose dvc.lock has a digest, the oldest first; each commit once."""
    known = dict(_runs("*"))
    if not known:
        return []
    lines = _git("grep", "-l", "--fixed-strings", digest, *known, "--", "dvc.lock").splitlines()
    holding = {line.partition(":")[0] for line in lines}
    return [branch for commit, branch in known.items() if commit in holding]


def branches_at(commit: str) -> list[str]:
    """List the branches, also remote ones, that point at a commit."""
    places = ("refs/heads", "refs/remotes")
    form = "--format=%(refname:short)"
    return _git("for-each-ref", form, f"--points-at={commit}", *places).splitlines()


def _runs(recipe: str) -> list[tuple[str, str]]:
    """List commit and branch of each run of a recipe, the oldest first."""
    names = [f"refs/{namespace}/runs/{recipe}-[0-9]*" for namespace in ("heads", "remotes/*")]
    form = "--format=%(objectname) %(refname:short)"
    listed = _git("for-each-ref", "--sort=committerdate", form, *names).splitlines()
    return [(line[:40], line[41:]) for line in listed]


def equal_run(tree: str, parent: str, recipe: str) -> str | None:
    """Return the branch of a run with the same parent and the same files, or None."""
    form = "--format=%(tree) %(parent) %(refname:short)"
    for line in _git("for-each-ref", form, f"refs/heads/runs/{recipe}-*").splitlines():
        if line.startswith(f"{tree} {parent} "):
            return line.rsplit(" ", 1)[1]
    return None


# ---------------------------------------------------------------- worktrees and commits of runs


def add_worktree(worktree: Path, commit: str) -> None:
    """Check ``commit`` out at ``worktree``, on no branch; an earlier worktree there is removed."""
    remove_worktree(worktree)
    _do_git("worktree", "add", "--force", "--detach", str(worktree), commit)


def remove_worktree(worktree: Path) -> None:
    """Remove a worktree, also an incomplete one."""
    _call_git("worktree", "remove", "--force", "--force", str(worktree))
    shutil.rmtree(worktree, ignore_errors=True)
    _do_git("worktree", "prune")


def fetch_commit(commit: str) -> None:
    """Fetch a commit from the git remotes where it is missing; RuntimeError where none has it."""
    if not _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"):
        _call_git("fetch", "--all", "--quiet")
    if not _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"):
        raise RuntimeError(
            f"{Path.cwd()} does not have the commit {commit}, and none of its git remotes does: "
            "git push it to one of them"
        )


def stage_files(paths: Sequence[str], root: Path) -> str:
    """Add files, also ignored ones, to a worktree's index; return the tree of it."""
    _do_git("add", "--force", "--", *paths, root=root)
    return _do_git("write-tree", root=root)


def commit(message: str, root: Path) -> str:
    """Commit what ``stage_files`` has added; unsigned, because nobody may be there to sign."""
    _do_git("-c", "commit.gpgsign=false", "commit", "--quiet", "--message", message, root=root)
    return head(root)


def branch(name: str, commit: str) -> None:
    """Create or move the branch ``name`` to ``commit``."""
    _do_git("branch", "--force", name, commit)


# ---------------------------------------------------------------- git itself


def _git(*arguments: str, root: Path = HERE) -> str:
    """Return what a git command prints; an empty text where it fails."""
    return _call_git(*arguments, root=root).stdout.rstrip()


def _do_git(*arguments: str, root: Path = HERE) -> str:
    """Return what a git command prints; RuntimeError with git's message where it fails."""
    done = _call_git(*arguments, root=root)
    if done.returncode:
        raise RuntimeError(f"git {arguments[0]} failed in {root.absolute()}: {done.stderr.strip()}")
    return done.stdout.rstrip()


def _call_git(*arguments: str, root: Path = HERE) -> subprocess.CompletedProcess[str]:
    """Run git without hooks: they are meant for people's commits; DVC's would check out."""
    command = ["git", "-C", str(root), "-c", "core.hooksPath=/dev/null", *arguments]
    # in a git hook that starts a run, these would point git to the hook's checkout
    environment = {key: value for key, value in os.environ.items() if key not in OF_A_HOOK}
    return subprocess.run(command, capture_output=True, text=True, env=environment)

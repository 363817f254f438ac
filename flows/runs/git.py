"""Read and write git: the checkout's commit, the content of commits, branches of runs, worktrees.

Paths are relative to the current folder, the project's root, or to ``root``, that of another
checkout. What dvc.lock names is read by flows/runs/pipeline.py.

Every call of git goes through ``run_git``: in an environment that names no other repository, and
with settings that keep what is printed and committed the same, whatever a user's own are. What is
parsed comes from git's plumbing, which reads few settings, and with NUL between entries.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.runs import bounded_yaml

HERE = Path()
# Environment variables that say where a repository is, or how paths are read: a hook of git that
# starts a run has set them for its own repository. Those of users stay: identity, SSH,
# certificates, prompts, GIT_CONFIG_GLOBAL, settings in GIT_CONFIG_COUNT and GIT_CONFIG_PARAMETERS.
ELSEWHERE = (
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_IMPLICIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE"),
    *("GIT_INDEX_VERSION", "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES"),
    *("GIT_QUARANTINE_PATH", "GIT_SHALLOW_FILE", "GIT_GRAFT_FILE", "GIT_REPLACE_REF_BASE"),
    *("GIT_NO_REPLACE_OBJECTS", "GIT_PREFIX", "GIT_INTERNAL_SUPER_PREFIX", "GIT_NAMESPACE"),
    *("GIT_CEILING_DIRECTORIES", "GIT_CONFIG", "GIT_ATTR_SOURCE", "GIT_LITERAL_PATHSPECS"),
    *("GIT_GLOB_PATHSPECS", "GIT_NOGLOB_PATHSPECS", "GIT_ICASE_PATHSPECS", "GIT_PAGER_IN_USE"),
)
SETTINGS = {  # of every call; they outrank those of the user's files and environment
    "core.hooksPath": "/dev/null",  # hooks are meant for people's commits; DVC's would check out
    "core.fsmonitor": "false",  # a hook, too
    "core.quotePath": "false",
    "core.commentChar": "#",  # a letter would take lines of a run's message for comments
    "core.warnAmbiguousRefs": "true",  # decides how short the name of a branch is
    "color.ui": "false",
    **{f"color.{command}": "false" for command in ("branch", "diff", "grep", "status")},
    "log.showSignature": "false",
    "log.mailmap": "false",
    "i18n.commitEncoding": "UTF-8",
    "i18n.logOutputEncoding": "UTF-8",
    "trailer.separators": ":",
    "submodule.recurse": "false",
}
AS_COMMITTED = {  # where files of a run are written or added: their bytes are those of the commit
    "core.autocrlf": "false",
    "core.safecrlf": "false",
    "core.eol": "lf",
    "core.attributesFile": "/dev/null",
    "core.sparseCheckout": "false",
}
PLAINLY = ("--quiet", "--no-gpg-sign", "--cleanup=whitespace", "--no-status")  # of each commit
NOT_FOUND = 127  # the exit status of a shell for a program that is not there
WRITTEN_BY_RUNS = (":!dvc.lock", ":!reports", ":!params/resolved")  # never an input of a run
MOST_FILES = 100_000  # of a commit, with its folders: a small tree of git can stand for 10**9
MOST_LISTED = 2**26  # bytes of their names, which repeat the folders' above


@dataclass(frozen=True)
class Revision:
    """The commit of a checkout; empty before the first one."""

    commit: str
    dirty: bool


def revision() -> Revision:
    """Return the checkout's commit, and whether anything but outputs of runs differs from it."""
    commit = _git("rev-parse", "--verify", "--quiet", "HEAD")
    changes = _status("--untracked-files=normal", "--", ".", *WRITTEN_BY_RUNS)
    return Revision(commit, dirty=not commit or bool(changes))


def _status(*arguments: str) -> list[str]:
    return _entries("status", "--porcelain", "-z", "--no-renames", *arguments)


def fault(root: Path = HERE) -> str:
    """Return why git cannot use the repository of a checkout, in git's words, and the remedy.

    Empty where it can.
    """
    done = run_git("rev-parse", "--is-inside-work-tree", root=root)
    where, said = root.absolute(), done.stderr.strip()
    if done.returncode == NOT_FOUND:
        return f"{said}: install git, or put its folder into PATH"
    if done.returncode and not _has_repository(where):
        return (
            f"{where} is in no git repository (an unpacked archive has none): git init is enough "
            "for make run; git add --all && git commit, too, for a run as a commit; or git clone "
            "the project. make plan works without"
        )
    if done.returncode:
        return (
            f"git cannot use the repository of {where}: {said}. Correct that, or git clone the "
            "project into another folder and run there; git init would not help"
        )
    if done.stdout.strip() != "true":
        return (
            f"the git repository of {where} is bare, so git sees no checkout here: git config "
            "core.bare false if that was set by mistake, else git clone it and run in the clone"
        )
    return ""


def _has_repository(folder: Path) -> bool:
    return any(os.path.lexists(each / ".git") for each in (folder, *folder.parents))


def check_repository() -> None:
    """Raise ValueError where git cannot use the checkout, or it is a part of a repository only.

    A run as a commit needs a worktree of it, and a worktree has the whole repository.
    """
    if reason := fault():
        raise ValueError(reason)
    if inside := _git("rev-parse", "--show-prefix"):
        whole = _git("rev-parse", "--show-toplevel")
        raise ValueError(
            f"{Path.cwd()} is the folder {inside} of the git repository {whole}, and a run as a "
            "commit needs a repository whose root has dvc.yaml: git clone the project into a "
            "folder of its own, or run with --here (make run)"
        )


def uncommitted(*besides: str) -> list[str]:
    """List tracked files that differ from the last commit, as ``git status`` prints them.

    Outputs of runs and the paths ``besides`` are left out.
    """
    beside = [f":!{path}" for path in besides]
    return _status("--untracked-files=no", "--", ".", *WRITTEN_BY_RUNS, *beside)


def untracked(folder: str) -> list[str]:
    """List the files of a folder that git does not track, ignored ones included.

    Python's compiled files are left out.
    """
    listed = _entries("ls-files", "--others", "-z", "--", folder, ":!**/__pycache__/**")
    return [file for file in listed if not file.endswith(".pyc")]


def tracked(root: Path) -> list[str]:
    """List the files of a checkout that git tracks. Raises RuntimeError where git cannot."""
    return [name for name in _do_git("ls-files", "-z", root=root).split("\0") if name]


def files_at(commit: str, folder: str) -> set[str]:
    """Return the paths of the files that a commit has in a folder and those below it.

    Empty where git fails. Raises ValueError for too many.
    """
    try:
        entries = [entry.partition("\t") for entry in tree(commit, "--", folder)]
    except RuntimeError:
        return set()
    return {name for about, _, name in entries if about.split()[1] != "tree"}


def tree(commit: str, *arguments: str) -> list[str]:
    """Return what ``git ls-tree`` lists of a commit with all folders: "mode type object<tab>name".

    Raises ValueError for more than MOST_FILES, which are not read to their end, and RuntimeError
    where git fails.
    """
    done = run_git("ls-tree", "-r", "-t", "-z", commit, *arguments, is_enough=_is_too_much)
    if _is_too_much(done.stdout):
        raise ValueError(
            f"commit {commit} has more than {MOST_FILES} files and folders, or names of more than "
            f"{MOST_LISTED} bytes: no run has"
        )
    if done.returncode:
        raise RuntimeError(f"git ls-tree failed for {commit}: {done.stderr.strip()}")
    return [entry for entry in done.stdout.split("\0") if entry]


def _is_too_much(output: bytearray | str) -> bool:
    nul: Any = "\0" if isinstance(output, str) else b"\0"
    return len(output) > MOST_LISTED or output.count(nul) > MOST_FILES


def committed(path: str, root: Path = HERE, at: str = "HEAD") -> bool:
    """Return whether a commit, by default the last one, has this file or a file in this folder."""
    return bool(_git("ls-tree", "-z", "--name-only", at, "--", path, root=root))


def head(root: Path) -> str:
    """Return the commit that a worktree has checked out."""
    return _do_git("rev-parse", "HEAD", root=root)


def resolve(revision: str) -> str:
    """Return the commit of a branch, tag or abbreviated hash; ValueError where there is none."""
    commit = _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if not commit:  # a branch that only a remote of this clone has
        commits = _git("for-each-ref", "--format=%(objectname)", f"refs/remotes/*/{revision}")
        commit = commits.partition("\n")[0]
    if not commit and (reason := fault()):
        raise ValueError(reason)
    if not commit:
        raise ValueError(
            f"'{revision}' names no commit here: `git branch --all --list '*runs/*'` lists the "
            "runs; `git fetch` brings those of others"
        )
    return commit


def trailer(commit: str, key: str) -> str:
    """Return the value of a ``Key: value`` line at the end of a commit's message, or ""."""
    return _git("log", "--no-walk", f"--format=%(trailers:key={key},valueonly)", commit)


def check_identity() -> None:
    """Raise ValueError where git has no name and e-mail address to commit with."""
    if not _git("var", "GIT_COMMITTER_IDENT"):
        raise ValueError(
            "git does not know who commits: git config --global user.name <name>, and user.email"
        )


# ---------------------------------------------------------------- content of commits


def content(commit: str, file: str) -> str:
    """Return a file's text at a commit. Raises ValueError where commit or file is missing."""
    shown = _blob(commit, file)
    if shown.returncode:
        raise ValueError(f"commit {commit} has no {file}: {shown.stderr.strip()}")
    return shown.stdout


def size(commit: str, file: str) -> int | None:
    """Return the bytes of a file at a commit, or None where it has none."""
    text = _git("cat-file", "-s", f"{commit}:./{file}")
    return int(text) if text.isdigit() else None


def _blob(commit: str, file: str) -> subprocess.CompletedProcess[str]:
    return run_git("cat-file", "blob", f"{commit}:./{file}")


def locked_at(commit: str) -> dict[str, Any]:
    """Return the stages of dvc.lock at a commit. Raises as ``content``, and for a damaged file."""
    locked = yaml_at(commit, "dvc.lock") or {}
    try:
        stages: dict[str, Any] = dict(locked.get("stages", {}))
        outs = [out for stage in stages.values() for out in stage.get("outs", [])]
        if all(isinstance(out["path"], str) and isinstance(out["md5"], str) for out in outs):
            return stages
    except (AttributeError, TypeError, ValueError, KeyError):
        pass
    raise ValueError(f"commit {commit} has a dvc.lock that DVC has not written")


def yaml_at(commit: str, file: str) -> Any:
    """Return the content of a YAML file at a commit.

    Raises ValueError where it is missing, no YAML, or exceeds the bounds of bounded_yaml.
    """
    name, bytes_ = f"{file} of commit {commit}", size(commit, file) or 0
    if bytes_ > bounded_yaml.LARGEST:
        raise ValueError(f"{name} has {bytes_} bytes: at most {bounded_yaml.LARGEST} are read")
    return bounded_yaml.load(content(commit, file), name)


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
    stages = locked_at(commit) if committed("dvc.lock", at=commit) else {}
    return sorted({str(name).rpartition("@")[2] for name in stages})


def with_digest(file: str, digest: str, commit: str) -> bytes | None:
    """Return a file's content at the time when its MD5 was ``digest``; None where it never was.

    Searches the history up to ``commit``.
    """
    for older in _git("rev-list", commit, "--", file).splitlines():
        content = _bytes_at(older, file)
        if hashlib.md5(content).hexdigest() == digest:
            return content
    return None


def folder_with_digest(folder: str, digest: str, commit: str) -> dict[str, bytes] | None:
    """Return the files of a folder when DVC gave it this digest: path in the folder -> content.

    Searches the history up to ``commit``. None where it has no such state, for instance because git
    does not track all of the folder.
    """
    for older in [commit, *_git("rev-list", commit, "--", folder).splitlines()]:
        names = files_at(older, folder)
        files = {str(Path(name).relative_to(folder)): _bytes_at(older, name) for name in names}
        if _folder_digest(files) == digest:
            return files
    return None


def _bytes_at(commit: str, file: str) -> bytes:
    return _blob(commit, file).stdout.encode(*TEXT)


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


def commits_of_runs(recipe: str) -> dict[str, str]:
    """Return the commit of each run of a recipe, or of "*", by its branch, the oldest first."""
    return {branch: commit for commit, branch in _runs(recipe)}


def commits_of(path: str, most: int) -> list[str]:
    """List the last commits up to HEAD that changed a file, the newest first."""
    return _git("log", f"--max-count={most}", "--format=%H", "--", path).split()


def runs_with(digest: str) -> list[str]:
    """List the branches of runs whose dvc.lock has a digest, the oldest first; each commit once."""
    known = dict(_runs("*"))
    if not known:
        return []
    same = ("--no-color", "--no-recurse-submodules", "--fixed-strings", "-e", digest)
    lines = _git("grep", "--files-with-matches", *same, *known, "--", "dvc.lock").splitlines()
    holding = {line.partition(":")[0] for line in lines}
    return [branch for commit, branch in known.items() if commit in holding]


def branches_at(commit: str) -> list[str]:
    """List the branches, also remote ones, that point at a commit."""
    places = ("refs/heads", "refs/remotes")
    form = "--format=%(refname:short)%00"
    listed = _entries("for-each-ref", form, f"--points-at={commit}", *places)
    names = [entry.strip("\n") for entry in listed]
    return [name for name in names if name and name.isprintable()]


def _runs(recipe: str) -> list[tuple[str, str]]:
    """List commit and branch of each run of a recipe, the oldest first.

    Names are printed, so those with characters that a terminal acts on are left out.
    """
    names = [f"refs/{namespace}/runs/{recipe}-[0-9]*" for namespace in ("heads", "remotes/*")]
    form = "--format=%(objectname) %(refname:short)%00"
    listed = _entries("for-each-ref", "--sort=committerdate", form, *names)
    parts = [entry.strip("\n").partition(" ") for entry in listed]
    pairs = [(commit, name) for commit, _, name in parts]
    return [(commit, name) for commit, name in pairs if name and name.isprintable()]


def equal_run(tree: str, parent: str, recipe: str) -> str | None:
    """Return the branch of a run with the same parent and the same files, or None."""
    form = "--format=%(tree) %(parent) %(refname:short)"
    for line in _git("for-each-ref", form, f"refs/heads/runs/{recipe}-*").splitlines():
        if line.startswith(f"{tree} {parent} "):
            return line.rsplit(" ", 1)[1]
    return None


# ---------------------------------------------------------------- worktrees and commits of runs


def add_worktree(worktree: Path, commit: str) -> None:
    """Check ``commit`` out at ``worktree``, on no branch; an earlier worktree there is removed.

    Raises RuntimeError for a commit with a link where DVC and this program write in a worktree.
    """
    remove_worktree(worktree)
    _do_git("worktree", "add", "--force", "--detach", str(worktree), commit, settings=AS_COMMITTED)
    for name in (".beamline", ".dvc"):
        if (worktree / name).is_symlink():
            remove_worktree(worktree)
            raise RuntimeError(f"commit {commit} has a link at {name}: take it out of the commit")


def remove_worktree(worktree: Path) -> None:
    """Remove a worktree, also an incomplete one."""
    run_git("worktree", "remove", "--force", "--force", str(worktree))
    shutil.rmtree(worktree, ignore_errors=True)
    _do_git("worktree", "prune")


def leave_out(path: str, root: Path) -> None:
    """Have git take a tracked file of a worktree for unchanged, whatever is in it."""
    run_git("update-index", "--skip-worktree", "--", path, root=root)  # nothing to do if untracked


def fetch_commit(commit: str) -> None:
    """Fetch a commit from the git remotes where it is missing; RuntimeError where none has it."""
    if not _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"):
        run_git("fetch", "--all", "--quiet")
    if not _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"):
        raise RuntimeError(
            f"{Path.cwd()} does not have the commit {commit}, and none of its git remotes does: "
            "git push it to one of them"
        )


def stage_files(paths: Sequence[str], root: Path) -> str:
    """Add files, also ignored ones, to a worktree's index; return the tree of it."""
    _do_git("add", "--force", "--", *paths, root=root, settings=AS_COMMITTED)
    return _do_git("write-tree", root=root)


def commit(message: str, root: Path) -> str:
    """Commit what ``stage_files`` has added; unsigned, because nobody may be there to sign."""
    _do_git("commit", *PLAINLY, "--message", message, root=root)
    return head(root)


def initialize(folder: Path, message: str, author: str) -> None:
    """Make a folder a repository whose only commit has all files in it."""
    identity = {"user.name": author, "user.email": f"{author}@localhost"}
    _do_git("init", "--quiet", root=folder)
    _do_git("add", "--all", "--force", root=folder, settings=AS_COMMITTED)
    _do_git("commit", *PLAINLY, "--message", message, root=folder, settings=identity)


def branch(name: str, commit: str) -> None:
    """Create or move the branch ``name`` to ``commit``."""
    _do_git("branch", "--force", "--no-track", name, commit)


# ---------------------------------------------------------------- git itself


TEXT = ("utf-8", "surrogateescape")  # any bytes, and back


def _git(*arguments: str, root: Path = HERE) -> str:
    """Return what a git command prints; an empty text where it fails."""
    return run_git(*arguments, root=root).stdout.rstrip()


def _entries(*arguments: str, root: Path = HERE) -> list[str]:
    """Return what a git command prints with -z; nothing where it fails."""
    return [entry for entry in run_git(*arguments, root=root).stdout.split("\0") if entry]


def _do_git(*arguments: str, root: Path = HERE, settings: Mapping[str, str] | None = None) -> str:
    """Return what a git command prints; RuntimeError with git's message where it fails."""
    done = run_git(*arguments, root=root, settings=settings)
    if done.returncode:
        raise RuntimeError(f"git {arguments[0]} failed in {root.absolute()}: {done.stderr.strip()}")
    return done.stdout.rstrip()


def run_git(
    *arguments: str,
    root: Path = HERE,
    settings: Mapping[str, str] | None = None,
    is_enough: Callable[[bytearray], bool] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run git in ``root`` with SETTINGS and further ones.

    Its exit status is NOT_FOUND where there is no git. It is killed once its output ``is_enough``.
    """
    command = _command(arguments, root, settings)
    try:
        with (
            tempfile.TemporaryFile() as said,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=said, env=environment()
            ) as process,
        ):
            output, status = _read(process, is_enough), process.wait()
            said.seek(0)
            texts = (each.decode(*TEXT) for each in (output, said.read()))
            return subprocess.CompletedProcess(command, status, *texts)
    except FileNotFoundError:
        missing = f"git is in none of the folders of PATH, {os.environ.get('PATH', '')}"
        return subprocess.CompletedProcess(command, NOT_FOUND, "", missing)


def _read(
    process: subprocess.Popen[bytes], is_enough: Callable[[bytearray], bool] | None
) -> bytearray:
    """Return what a process prints, until it ends or that ``is_enough``."""
    output = bytearray()
    while part := process.stdout.read(2**20) if process.stdout else b"":
        output += part
        if is_enough and is_enough(output):
            process.kill()
            break
    return output


def _command(
    arguments: Sequence[str], root: Path = HERE, settings: Mapping[str, str] | None = None
) -> list[str]:
    pairs = [f"{key}={value}" for key, value in (SETTINGS | dict(settings or {})).items()]
    options = [part for pair in pairs for part in ("-c", pair)]
    return ["git", "--no-pager", "-C", str(root), *options, *arguments]


def environment() -> dict[str, str]:
    """Return the environment without what leads git to another repository; messages in English."""
    inherited = {key: value for key, value in os.environ.items() if key not in ELSEWHERE}
    return inherited | {"LC_ALL": "C", "LANGUAGE": "C"}


def forget_other_repositories() -> None:
    """Take the variables of ELSEWHERE out of this process: DVC's libraries read some of them."""
    for name in ELSEWHERE:
        os.environ.pop(name, None)

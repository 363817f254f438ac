"""Run the whole pipeline of a recipe: every stage of dvc.yaml as a task, in DVC's order.

``beamline retrain RECIPE [--set key=value …]`` runs the last commit in a worktree of its own
and ends as a commit on the branch ``runs/<recipe>-<date>-<id>``; the branch's name is the last line
that it prints. Other runs and edits in the checkout do not disturb it. After a kill, the same call
resumes the run.

Tracked files that differ from the last commit are refused, since the run could not be reproduced
from its commit. ``--set`` changes values of the recipe for this run alone, or choices of its
algorithm: ``algorithm.estimator.lambda=0``.

``--here`` runs in this checkout and commits nothing. A stage that nothing has changed for is
skipped, as by ``dvc repro``.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from flows import end_import_phase, exit_fast
from flows.host import disk, warm
from flows.host.parents import die_with_parent
from flows.runs import (
    champions,
    earlier_outs,
    equal_code,
    git,
    pipeline,
    recipe_list,
    remote_copies,
    transfer,
    worktree,
)
from flows.runs.dvc_command import INTERRUPTED, RUN, KilledError
from flows.tracking.run import send_unsent
from flows.workers import configured_server
from params import overrides, recipe_files
from params.run_folders import RunFolders
from params.schema.base import SOURCES
from params.schema.recipe import Recipe
from tasks import chat, recipes
from tasks.extensions.named import OWN
from tasks.questions.record_files import check_folder
from tasks.recipes import contradictions
from tasks.tools import web_cache
from tasks.trees.words import printable

REMEDY = "commit them, stash them (git stash), or run with --here"


# ---------------------------------------------------------------- a run as a commit


def run(recipe: str, changes: Sequence[str] = ()) -> str:
    """Run a recipe of the last commit in a worktree and commit it; return the run's branch.

    ``changes`` are values of the recipe as ``section.key=value``. The worktree of a failed or
    killed run stays, and the same call resumes it. Raises ValueError before any work for what
    cannot be run, RuntimeError for a run that fails: KilledError if a process of it was killed.
    """
    check_run(recipe, changes)
    base = git.revision().commit
    purpose = {"recipe": recipe, "overrides": list(changes), "commit": base}
    with worktree.held(recipe, purpose) as folder:
        try:
            if not worktree.is_ready(folder):
                set_up(folder, recipe, changes, base)
            branch = complete(folder, recipe, changes, base)
        except (ValueError, RuntimeError) as error:
            kind = KilledError if isinstance(error, KilledError) else RuntimeError
            raise kind(
                f"{error}\nretrain: the run is unfinished in {folder}; the same call goes on "
                f"there, git worktree remove --force {shlex.quote(str(folder))} drops it"
            ) from None
        worktree.collect_ledger(recipe, folder)
        worktree.finish(folder)
    try:
        remote_copies.push_missing(recipe)  # of earlier runs, too
    except RuntimeError as error:
        raise RuntimeError(f"{branch} is there, but {error}") from None
    return branch


def check_run(recipe: str, changes: Sequence[str]) -> None:
    """Raise ValueError for a run that could not end as a commit, or whose recipe does not hold."""
    git.check_repository()
    git.check_identity()
    if not git.revision().commit:
        raise ValueError("there is no commit yet that could be run: git add and commit")
    if differ := git.uncommitted():
        listed = "\n".join(f"  {line}" for line in differ)
        raise ValueError(f"these files differ from the last commit: {REMEDY}\n{listed}")
    if unknown := git.untracked(str(OWN)):
        listed = "\n".join(f"  {file}" for file in unknown)
        raise ValueError(
            f"git does not track these files of {OWN}/, so the run's commit would lack them: git "
            f"add and commit them, move them away, or run with --here\n{listed}"
        )
    check_machine(recipe, recipes.load_changed(recipe, changes, Path("params")))
    for written in recipe_files.resolve(recipe, Path("params")).chain:
        if not git.committed(written.file.as_posix()):
            raise ValueError(f"{written.file} is in no commit yet: git add and commit it")
    pipeline.stages(recipe)
    configured_server.check()


def check_machine(name: str, recipe: Recipe, stages: Collection[str] = disk.STAGES) -> None:
    """Raise ValueError with all that this machine lacks for the stages that no worker may run."""
    from flows.host import requirements  # with the engines, which not every call needs

    if not requirements.faults(recipe, os.environ, stages):
        return
    from flows.workers import dispatch  # with Prefect, which not every call needs

    requirements.check(name, recipe, {*stages} - dispatch.sent_elsewhere(name))


def set_up(folder: Path, recipe: str, changes: Sequence[str], commit: str) -> None:
    """Make the worktree of a run: the commit, the changed recipe, and what .dvc files track."""
    git.add_worktree(folder, commit)
    transfer.share(folder)
    transfer.provide_sources(folder)
    overrides.apply_to(recipe, changes, folder / "params")
    name_champion(recipe, folder)
    recipe_files.refresh(recipe, folder / "params")
    worktree.link_ledger(recipe, folder)
    worktree.set_ready(folder)


def complete(folder: Path, recipe: str, changes: Sequence[str], base: str) -> str:
    """Finish a run: stages, commit, branch, promotion and push; return its branch."""
    commit = git.head(folder)
    if commit == base:
        check_files(folder)
        if (known := pipeline.already_run(recipe, folder)) and not is_overtaken(recipe, known):
            print(f"nothing new since {known}")
            return known
        from flows.all_stages import run_in  # with Prefect, which not every call needs

        run_in(recipe, folder, changes)
        tree = git.stage_files(existing(pipeline.kept_in_git(recipe, folder), folder), folder)
        if known := git.equal_run(tree, base, recipe):
            print(f"nothing new: {known} is this run")
            return known
        commit = git.commit(message(recipe, changes, base, folder), folder)
    branch = f"runs/{folder.name}"
    git.branch(branch, commit)
    after_commit(recipe, commit)
    try:
        transfer.push(recipe, folder)
    except RuntimeError as error:
        raise RuntimeError(f"{branch} is there, but {error}") from None
    return branch


def name_champion(recipe: str, folder: Path) -> None:
    """Write the champion into the run's recipe, once, so that a resumed run keeps it."""
    try:
        champions.fetch(recipe, folder / "params" / f"{recipe}.yaml")
    except champions.RegistryError as error:
        print(f"retrain: {printable(str(error))}", file=sys.stderr)


def is_overtaken(recipe: str, branch: str) -> bool:
    """Return whether another run became champion before this earlier run could be promoted.

    A run that was not promoted only because the registry was unreachable is promoted now.
    """
    commit = git.resolve(branch)
    if not git.committed(RunFolders(recipe).verdict.as_posix(), at=commit):
        return False
    try:
        print(f"retrain: {champions.promote(recipe, commit)}")
    except champions.OvertakenError as error:
        print(f"retrain: {branch}: {error}")
        return True
    except champions.RegistryError as error:
        print(f"retrain: {printable(str(error))}", file=sys.stderr)
    return False


def after_commit(recipe: str, commit: str) -> None:
    """Promote the run's policy if its verdict says so. Safe to call again after a kill."""
    if not git.committed(RunFolders(recipe).verdict.as_posix(), at=commit):
        print(f"retrain: not promoted: dvc.yaml has no stage that writes a verdict on {recipe}")
        return
    try:
        print(f"retrain: {champions.promote(recipe, commit)}")
    except champions.RegistryError as error:
        print(f"retrain: {printable(str(error))}", file=sys.stderr)


def is_rejected(recipe: str, branch: str) -> bool:
    """Return whether the verdict of a run is not to promote its policy."""
    file = RunFolders(recipe).verdict.as_posix()
    commit = git.resolve(branch)
    return git.committed(file, at=commit) and not json.loads(git.content(commit, file))["promote"]


def existing(paths: Sequence[str], folder: Path) -> list[str]:
    """Return the paths that exist below ``folder``."""
    return [path for path in paths if (folder / path).exists()]


def message(recipe: str, changes: Sequence[str], base: str, folder: Path) -> str:
    """Return the message of a run's commit; its last lines are git trailers."""
    success = headline(folder / "reports" / recipe / "metrics.json")
    lines = [f"Run of {recipe}" + (f": {success}" if success else ""), ""]
    if changes:
        lines += [*changes, ""]
    lines += [f"Recipe: {recipe}", f"Code: {base}", *(f"Set: {change}" for change in changes)]
    return "\n".join(lines)


def headline(metrics: Path) -> str:
    """Return the trained agent's success with its 95 % interval, or "" where none was measured."""
    try:
        measured = json.loads(metrics.read_text())["success"]["trained"]
        mean, low, high = (100 * measured[name] for name in ("mean", "low", "high"))
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f"success {mean:.1f} % [{low:.1f}, {high:.1f}]"


# ---------------------------------------------------------------- the command line


def main(arguments: list[str]) -> int:
    """Run the command line and return the exit status; 2 where nothing could be started."""
    parser = argparse.ArgumentParser(
        prog="beamline retrain",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", help="params/<recipe>.yaml")
    parser.add_argument("--here", action="store_true", help="in this checkout, without a commit")
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="section.key=value",
        help="values of the recipe for this run",
    )
    args = parser.parse_args(arguments)
    if args.here and args.set:
        print(
            f"retrain: --set changes a worktree's recipe: with --here, edit params/{args.recipe}"
            ".yaml",
            file=sys.stderr,
        )
        return 2
    return _here(args.recipe) if args.here else _as_commit(args.recipe, args.set)


def _as_commit(recipe: str, changes: Sequence[str]) -> int:
    # the worktree of a run shares the answers of the web and of models that this checkout has
    os.environ.setdefault(web_cache.FOLDER, str(web_cache.DEFAULT.absolute()))
    os.environ.setdefault(chat.FOLDER, str(chat.DEFAULT.absolute()))
    try:
        print(run(recipe, changes))
    except (ValueError, RuntimeError) as error:
        print(f"retrain: {printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print("retrain: interrupted; the same call goes on from here", file=sys.stderr)
        return INTERRUPTED
    return 0


def check_files(root: Path = Path()) -> None:
    """Raise ValueError, with every path, for inputs that never end: DVC would read them.

    These are pipes, devices, sockets and links to them.
    """
    faults = []
    for folder, links in ((SOURCES, True), (Path("params"), False), (OWN, False)):
        try:
            check_folder(root / folder, links=links)
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))


def _here(recipe: str) -> int:
    try:
        check_files()
        _put_back()
        machine = recipes.load(recipe, Path("params")).machine
        if listed := recipe_list.add_to_pipeline(recipe):
            print(f"retrain: added {recipe} to the recipes in {listed}")
        recipe_files.refresh(recipe, Path("params"))
        pipeline.follow_file(recipe)
        changed = pipeline.status(recipe)
        if changed and (equal := equal_code.take_over(recipe)):
            print(f"{', '.join(equal)}: the code runs as before, so dvc.lock takes it over")
            changed = pipeline.status(recipe)
    except (ValueError, RuntimeError) as error:
        print(f"retrain: {printable(str(error))}", file=sys.stderr)
        return 2
    if not changed:
        send_unsent()
        _push_rest(recipe)
        print(f"nothing to do: {recipe} is up to date\n\n{_table(recipe)}")
        return 0
    # a library that looks for GPUs when it is imported would keep children from using them
    with warm.parent() if machine.device == "cpu" else nullcontext():
        return _check_and_run(recipe, changed)


def _put_back() -> None:
    if restored := earlier_outs.put_back(Path()):
        print(f"retrain: put back after a kill: {', '.join(restored)}", flush=True)


def _push_rest(recipe: str) -> None:
    """Push what the remote lacks of the recipe's runs; what is here stays up to date without."""
    if RUN in os.environ:  # of a run as a commit, which does it at its end
        return
    try:
        remote_copies.push_missing(recipe)
    except RuntimeError as error:
        print(f"retrain: {printable(str(error))}", file=sys.stderr)


def _check_and_run(recipe: str, changed: Mapping[str, Sequence[str]]) -> int:
    stages = from_the_first_of(changed)
    try:
        configured_server.check()
        from flows.workers.stage import check  # with Prefect, which not every call needs

        check(recipe, stages)
        check_machine(recipe, recipes.load(recipe, Path("params")), stages)
    except (ValueError, RuntimeError) as error:
        print(f"retrain: {printable(str(error))}", file=sys.stderr)
        return 2
    _warn(recipe, contradictions.faults(recipes.load(recipe, Path("params"))))
    ran_before = pipeline.locked()
    for name, reasons in changed.items():
        if name in ran_before:
            print(f"{name} has to run: {'; '.join(reasons)}")
    return _run(recipe)


def _warn(recipe: str, found: Sequence[str]) -> None:
    """Print what contradicts in a recipe, which stops nothing."""
    for line in found:
        print(printable(f"retrain: params/{recipe}.yaml: {line}"), file=sys.stderr)


def _run(recipe: str) -> int:
    from flows.all_stages import run_here  # with Prefect, which not every call needs

    try:
        if status := run_here(recipe):
            _put_back()  # what a stage has left that was killed alone
            return status
        equal_code.remember(recipe)
    except KeyboardInterrupt:
        print("retrain: interrupted; the next call goes on from here", file=sys.stderr)
        return INTERRUPTED
    print(f"\n{_table(recipe)}", flush=True)
    if RUN in os.environ:  # the run becomes a commit by itself
        return 0
    print("to see the run    make ui")
    listed = " params.yaml" if recipe_list.OWN.exists() else ""
    what = f"params{listed} own data/sources dvc.yaml dvc.lock reports/{recipe}"
    print(f"to keep it        git add {what} && git commit")
    print(f"as a commit       beamline retrain {recipe}, once the changes are committed")
    if (page := RunFolders(recipe).reports / "page.html").is_file():
        print(f"its page          {page}, which a browser opens")
    return 0


def from_the_first_of(changed: Collection[str]) -> Sequence[str]:
    """Return the stages that may run if these do ("reinforce@tiny"): they and those after them."""
    names = {name.partition("@")[0] for name in changed}
    first = min((disk.STAGES.index(name) for name in names & {*disk.STAGES}), default=0)
    return disk.STAGES[first:]


def _table(recipe: str) -> str:
    """Return the table of the last evaluation, and what the recipe says is to be expected."""
    table = RunFolders(recipe).table
    text = table.read_text() if table.exists() else f"{table} was not written"
    expected = recipes.load(recipe, Path("params")).expect
    return text + (f"\nwhat to expect of {recipe}: {expected}\n" if expected else "")


if __name__ == "__main__":
    end_import_phase()
    if RUN in os.environ:
        die_with_parent()
    exit_fast(main(sys.argv[1:]))

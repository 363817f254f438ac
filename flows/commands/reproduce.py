"""Restore a run from its commit: its data, models and metrics; or run it again and compare.

``beamline reproduce REV`` restores the outs of the run at REV, from DVC's cache or remote,
into a worktree below ``.beamline/restored``, and prints its path. No code of the commit runs, and a
commit that would reach out of the worktree is refused.

``--verify`` runs everything again with the commit's own code, which can do what you can: read the
commits of people you do not know first. It compares digest by digest:
"identical", or the first stage, iteration and sub-step that differs. Nothing of it reaches MLflow,
the registry or DVC's run-cache. A killed verification continues when it is called again.

``--replay`` verifies where sampling cannot be bit-exact, for instance on another machine: training
and the reward model use the trees that the run has stored, and everything after sampling is
compared.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from flows import end_import_phase, exit_fast
from flows.runs import (
    dvc_command,
    first_difference,
    git,
    pipeline,
    transfer,
    worktree,
)
from flows.runs.dvc_command import INTERRUPTED, RUN
from flows.runs.first_difference import StageDifference
from flows.runs.restoring import SHORT, restore
from flows.tracking import store
from params.run_folders import RunFolders
from tasks.tools.recording import CALLS, REPLAYED
from tasks.trees.tables import STORED_TREES
from tasks.trees.words import printable

LARGEST = 2**20  # bytes of a table that is printed; one has some kB
SAMPLED = "evaluate"  # samples anew, so --replay leaves it out


def changed_since(recipe: str, folder: Path) -> list[str]:
    """Return what git keeps of a run and is not what its dvc.lock says: changed after the run."""
    kept = set(git.tracked(folder))
    return [
        f"{path} of the commit is not what its run has made: it has the digest {actual[:SHORT]}, "
        f"and {digest[:SHORT]} in dvc.lock"
        for stage in pipeline.stages(recipe, folder)
        for path, digest in pipeline.digests(stage.name, folder).items()
        if path in kept and (folder / path).is_file()
        for actual in [hashlib.md5((folder / path).read_bytes()).hexdigest()]
        if actual != digest
    ]


def verify(commit: str, recipe: str, replay: bool = False) -> StageDifference | None:
    """Run a commit again and compare; return the first difference, or None.

    The worktree stays where they differ. Raises RuntimeError where the run fails.
    """
    before = restore(commit, recipe)
    stages = [stage.name for stage in pipeline.stages(recipe, before)]
    if replay:
        stages = stages[: stages.index(f"{SAMPLED}@{recipe}")]
    purpose = {"verify": commit, "recipe": recipe, "replay": replay}
    with worktree.held(f"verify-{recipe}", purpose) as folder:
        if not worktree.is_ready(folder):
            set_up(folder, commit, recipe, before)
        trees = stored_trees(before, recipe) if replay else {}
        run_again(folder, recipe, trees | recorded(before, recipe))
        difference = first_difference.first_difference(stages, before, folder, commit)
        if difference:
            worktree.release(folder)  # the next call runs again
            print(f"the new run is in {folder}; git worktree remove --force {folder} removes it")
        else:
            worktree.finish(folder)
    return difference


def stored_trees(before: Path, recipe: str) -> dict[str, str]:
    """Return where the new run finds the trees that it does not sample, of each stage with some."""
    folders = {
        "reinforce": before / "data" / recipe / "trees",
        "reward_model": before / "models" / recipe / "reward_model" / "trees",
    }
    return {
        STORED_TREES[stage]: str(folder) for stage, folder in folders.items() if folder.is_dir()
    }


def recorded(before: Path, recipe: str) -> dict[str, str]:
    """Return where the new run finds what tools, judges and a teacher's server have answered."""
    from tasks.chat.teacher_scores import SCORES  # with pyarrow

    data = before / "data" / recipe
    names = (CALLS, SCORES)
    return {REPLAYED: str(data)} if any(file.name in names for file in data.rglob("*")) else {}


def set_up(folder: Path, commit: str, recipe: str, before: Path) -> None:
    """Make a worktree of the commit without the outs of its run, which ``before`` has."""
    git.add_worktree(folder, commit)
    transfer.share(folder)
    transfer.provide_inputs(recipe, folder, before)
    transfer.forget_runs(folder)
    worktree.set_ready(folder)


def run_again(folder: Path, recipe: str, environment: dict[str, str]) -> None:
    """Run all stages in ``folder``, with the code, the ledger and the tracking store there."""
    separate = {
        RUN: folder.name,
        "BEAMLINE_STORE": "",
        "MLFLOW_TRACKING_URI": store.sqlite_uri(folder / ".beamline/mlflow.db", folder),
    }
    command = ["flows.retrain", recipe, "--here"]
    status = dvc_command.supervise(
        command, separate | environment, folder, grace=2 * dvc_command.GRACE
    )
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status:
        raise RuntimeError(f"{recipe} failed when it was run again in {folder}")


def recipe_of(commit: str) -> str:
    """Return the recipe that a commit is a run of; ValueError where there is not exactly one."""
    named = git.trailer(commit, "Recipe")
    recipes = [named] if named else git.recipes_at(commit)
    if len(recipes) != 1:
        raise ValueError(
            f"commit {commit[:SHORT]} has runs of {recipes} in its dvc.lock: choose one, --recipe"
            if recipes
            else f"commit {commit[:SHORT]} is no run: it has no dvc.lock"
        )
    return recipes[0]


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status. 1: it differs or fails; 2: it is no run."""
    parser = argparse.ArgumentParser(
        prog="beamline reproduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("revision", metavar="REV", help="a run's branch, or a commit")
    parser.add_argument("--recipe", help="where the commit has runs of several")
    parser.add_argument("--verify", action="store_true", help="run it again and compare")
    parser.add_argument("--replay", action="store_true", help="verify with the stored trees")
    args = parser.parse_args(arguments)
    try:
        commit = git.resolve(args.revision)
        recipe = args.recipe or recipe_of(commit)
        if args.verify or args.replay:
            return _verified(commit, recipe, args.replay)
        folder = restore(commit, recipe)
    except (ValueError, RuntimeError) as error:
        print(f"reproduce: {printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print("reproduce: interrupted; the same call continues", file=sys.stderr)
        return INTERRUPTED
    print(table_of(commit, recipe), end="")
    for stage in pipeline.stages(recipe, folder):
        for path, digest in pipeline.digests(stage.name, folder).items():
            print(printable(f"{digest[:SHORT]}  {folder / path}"))
    print("to look at it                  beamline page, figures or export, in the folder below")
    print(f"to run it again and compare    beamline reproduce {args.revision} --verify")
    print(folder)
    changed = changed_since(recipe, folder)
    for line in changed:
        print(f"reproduce: {printable(line)}", file=sys.stderr)
    return 1 if changed else 0


def table_of(commit: str, recipe: str) -> str:
    """Return the table of a run as its commit has it, as text that only prints; "" without one."""
    path = RunFolders(recipe).table.as_posix()
    size = git.size(commit, path)
    if size is None:
        return ""
    if size > LARGEST:
        return f"{path} is not shown: it has {size} bytes, and a table at most {LARGEST}\n"
    return f"{printable(git.content(commit, path))}\n"


def _verified(commit: str, recipe: str, replay: bool) -> int:
    print(f"this runs the code of commit {commit[:SHORT]}, which can do what you can", flush=True)
    difference = verify(commit, recipe, replay)
    after = f" (without {SAMPLED}, which samples anew)" if replay else ""
    same = f"identical: {recipe} at {commit[:SHORT]}{after}"
    print(printable(str(difference)) if difference else same)
    return 1 if difference else 0


if __name__ == "__main__":
    end_import_phase()
    exit_fast(main(sys.argv[1:]))

"""Restore a run from its commit: its data, models and metrics; or run it again and compare.

``python -m flows.reproduce REV`` restores the outs of the run at REV, from DVC's cache or remote,
into a worktree below ``.beamline/restored``, and prints its path.

``--verify`` runs everything again with the commit's own code, and compares digest by digest:
"identical", or the first stage, iteration and sub-step that differs. Nothing of it reaches MLflow,
the registry or DVC's run-cache. A killed verification continues when it is called again.

``--replay`` verifies where sampling cannot be bit-exact, for instance on another machine: training
and the reward model use the trees that the run has stored, and everything after sampling is
compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flows import end_import_phase, exit_fast
from flows.runs import dvc_command, first_difference, git, pipeline, transfer, worktree
from flows.runs.dvc_command import INTERRUPTED, RUN
from flows.runs.first_difference import Difference
from flows.tracking import store
from tasks.tools.recording import CALLS, REPLAYED
from tasks.trees.tables import STORED_TREES

HOME = Path(".beamline/restored")
SHORT = 12  # characters of a commit in a folder's name
SAMPLED = "evaluate"  # samples anew, so --replay leaves it out


def restore(commit: str, recipe: str) -> Path:
    """Restore the outs of a run in a worktree of its commit; return the worktree's path."""
    place = (HOME / f"{recipe}-{commit[:SHORT]}").absolute()
    with worktree.one_at_a_time(place):
        if not worktree.is_ready(place):
            git.add_worktree(place, commit)
            worktree.set_ready(place)
        transfer.share(place)
        transfer.restore_run(recipe, place)
    return place


def verify(commit: str, recipe: str, replay: bool = False) -> Difference | None:
    """Run a commit again and compare; return the first difference, or None.

    The worktree stays where they differ. Raises RuntimeError where the run fails.
    """
    before = restore(commit, recipe)
    stages = [stage.name for stage in pipeline.stages(recipe, before)]
    if replay:
        stages = stages[: stages.index(f"{SAMPLED}@{recipe}")]
    purpose = {"verify": commit, "recipe": recipe, "replay": replay}
    with worktree.held(f"verify-{recipe}", purpose) as place:
        if not worktree.is_ready(place):
            set_up(place, commit)
        trees = stored_trees(before, recipe) if replay else {}
        run_again(place, recipe, trees | recorded(before, recipe))
        found = first_difference.first_difference(stages, before, place, commit)
        if found:
            worktree.release(place)  # the next call runs again
            print(f"the new run is in {place}; git worktree remove --force {place} removes it")
        else:
            worktree.finish(place)
    return found


def stored_trees(before: Path, recipe: str) -> dict[str, str]:
    """Return where the new run finds the trees that it does not sample, of each stage with some."""
    places = {
        "reinforce": before / "data" / recipe / "trees",
        "reward_model": before / "models" / recipe / "reward_model" / "trees",
    }
    return {STORED_TREES[stage]: str(place) for stage, place in places.items() if place.is_dir()}


def recorded(before: Path, recipe: str) -> dict[str, str]:
    """Return where the new run finds the results of tools that are not repeatable."""
    data = before / "data" / recipe
    return {REPLAYED: str(data)} if any(data.rglob(CALLS)) else {}


def set_up(place: Path, commit: str) -> None:
    """Make a worktree of the commit without the outs of its run."""
    git.add_worktree(place, commit)
    (place / "dvc.lock").unlink()
    transfer.share(place)
    transfer.provide_sources(place)
    transfer.forget_runs(place)
    worktree.set_ready(place)


def run_again(place: Path, recipe: str, environment: dict[str, str]) -> None:
    """Run all stages at ``place``, with the code, the ledger and the tracking store there."""
    separate = {
        RUN: place.name,
        "BEAMLINE_STORE": "",
        "MLFLOW_TRACKING_URI": store.sqlite_uri(place / ".beamline/mlflow.db", place),
    }
    command = ["flows.retrain", recipe, "--here"]
    status = dvc_command.supervise(
        command, separate | environment, place, grace=2 * dvc_command.GRACE
    )
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status:
        raise RuntimeError(f"{recipe} failed when it was run again in {place}")


def recipe_of(commit: str) -> str:
    """Return the recipe that a commit is a run of; ValueError where there is not exactly one."""
    named = git.trailer(commit, "Recipe")
    found = [named] if named else git.recipes_at(commit)
    if len(found) != 1:
        raise ValueError(
            f"commit {commit[:SHORT]} has runs of {found} in its dvc.lock: choose one, --recipe"
            if found
            else f"commit {commit[:SHORT]} is no run: it has no dvc.lock"
        )
    return found[0]


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status. 1: it differs or fails; 2: it is no run."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.reproduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("revision", metavar="REV", help="a run's branch, or a commit")
    parser.add_argument("--recipe", help="where the commit has runs of several")
    parser.add_argument("--verify", action="store_true", help="run it again and compare")
    parser.add_argument("--replay", action="store_true", help="verify with the stored trees")
    chosen = parser.parse_args(arguments)
    try:
        commit = git.resolve(chosen.revision)
        recipe = chosen.recipe or recipe_of(commit)
        if chosen.verify or chosen.replay:
            return _verified(commit, recipe, chosen.replay)
        place = restore(commit, recipe)
    except (ValueError, RuntimeError) as error:
        print(f"reproduce: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print("reproduce: interrupted; the same call continues", file=sys.stderr)
        return INTERRUPTED
    table = place / "reports" / recipe / "table.md"
    print(f"{table.read_text()}\n" if table.exists() else "", end="")
    for stage in pipeline.stages(recipe, place):
        for path, digest in pipeline.digests(stage.name, place).items():
            print(f"{digest[:SHORT]}  {place / path}")
    print(f"to run it again and compare    python -m flows.reproduce {chosen.revision} --verify")
    print(place)
    return 0


def _verified(commit: str, recipe: str, replay: bool) -> int:
    found = verify(commit, recipe, replay)
    after = f" (without {SAMPLED}, which samples anew)" if replay else ""
    print(found or f"identical: {recipe} at {commit[:SHORT]}{after}")
    return 1 if found else 0


if __name__ == "__main__":
    end_import_phase()
    exit_fast(main(sys.argv[1:]))

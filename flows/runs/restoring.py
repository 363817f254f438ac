"""Restore what the run of a commit has made, in a worktree of that commit."""

from __future__ import annotations

from pathlib import Path

from flows.runs import commit_check, git, transfer, worktree

HOME = Path(".beamline/restored")
SHORT = 12  # characters of a commit in a folder's name


def restore(commit: str, recipe: str) -> Path:
    """Restore the outs of a run in a worktree of its commit; return the worktree's path.

    None of the commit's code runs. Raises ValueError, before anything is written, for a commit that
    would reach out of its worktree.
    """
    commit_check.check(commit, recipe)
    _check_run(commit, recipe)
    folder = (HOME / f"{recipe}-{commit[:SHORT]}").absolute()
    with worktree.one_at_a_time(folder):
        if not worktree.is_ready(folder):
            git.add_worktree(folder, commit)
            worktree.set_ready(folder)
        transfer.share(folder)
        try:
            transfer.restore_run(recipe, folder)
        except (ValueError, RuntimeError) as error:
            raise type(error)(f"commit {commit} is not restored: {error}") from None
    return folder


def _check_run(commit: str, recipe: str) -> None:
    """Raise ValueError for a commit that has no run of a recipe."""
    recipes = git.recipes_at(commit)
    if not git.committed("dvc.yaml", at=commit):
        raise ValueError(f"commit {commit} is no run: it has no dvc.yaml")
    if recipe not in recipes:
        others = f"it has runs of {', '.join(recipes)}: choose one" if recipes else "it has none"
        raise ValueError(
            f"commit {commit} has no stage for the recipe '{recipe}' in its dvc.lock: {others}"
        )

"""Say what to do where a checkout has no run of a recipe."""

from __future__ import annotations


def remedy(recipe: str) -> str:
    """Return how a run of the recipe comes here; one as a commit is in a worktree of its own."""
    return (
        f"run `make run RECIPE={recipe}` first, or restore a run with `beamline reproduce "
        "<branch>` and call this in the folder that it prints"
    )

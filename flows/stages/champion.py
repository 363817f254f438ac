"""Restore the champion that the recipe names, from DVC's cache or remote."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.runs import cache
from flows.workers import stage
from params.run_folders import RunFolders
from tasks import recipes
from tasks.policy.champion import write


@flow(name="champion")
def champion_flow(name: str) -> None:
    """Write ``models/<recipe>/champion``; without a champion, a file that says so."""
    recipe = recipes.load(name, Path("params"))
    write(RunFolders(name).champion, recipe.champion, cache.restore)


if __name__ == "__main__":
    stage.main(champion_flow)

"""Bring the champion and the teacher that the recipe names, from DVC's cache, remote or a hub."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.runs import cache
from flows.workers import stage
from params.run_folders import RunFolders
from tasks import recipes
from tasks.policy import champion, teacher


@flow(name="champion")
def champion_flow(name: str) -> None:
    """Write ``models/<recipe>/champion`` and ``teacher``; without one, a file that says so."""
    recipe = recipes.load(name, Path("params"))
    champion.write(RunFolders(name).champion, recipe.champion, cache.restore)
    teacher.write(RunFolders(name).teacher, recipe.teacher, cache.restore)


if __name__ == "__main__":
    stage.main(champion_flow)

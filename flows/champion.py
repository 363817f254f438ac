"""The champion that the recipe names, from DVC's cache or remote."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows import stage
from params import schema
from tasks import version
from tasks.champion import write


@flow(name="champion")
def champion(recipe: str) -> None:
    """Make ``models/<recipe>/champion``; without a champion, a file that says so."""
    chosen = schema.load(recipe, Path("params"))
    write(Path("models", recipe, "champion"), chosen.champion, version.restore)


if __name__ == "__main__":
    stage.main(champion)

"""Refuse a call of a stage's program before its libraries are imported, which takes seconds.

What a stage itself checks is checked there again, and more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

PARAMS = Path("params")
REFUSED, FAILED = 2, 1  # exit statuses
NEEDED: dict[str, tuple[str, ...]] = {  # stage -> what earlier stages make; {}: the recipe
    "prepare": (),
    "champion": (),
    "cold_start": ("models/{}/initial", "data/{}/traces.parquet"),
    "reward_model": ("data/{}/questions/train.parquet", "models/{}/cold_start"),
    "reinforce": ("data/{}/questions/train.parquet", "models/{}/cold_start"),
    "evaluate": ("models/{}/cold_start", "models/{}/trained", "data/{}/questions/test.parquet"),
    "verdict": ("data/{}/evaluation.parquet", "models/{}/champion"),
}


def parser(stage: str) -> argparse.ArgumentParser:
    """Return the parser of a stage's command line."""
    made = argparse.ArgumentParser(
        prog=f"beamline {stage}", description=f"Run the stage {stage} of a recipe, by itself."
    )
    made.add_argument("recipe", help="params/<recipe>.yaml")
    return made


def check(command: Sequence[str]) -> None:
    """Exit where a command, ``python -m flows.<stage> RECIPE``, cannot run or asks for help."""
    if "-m" not in command[:-1]:
        return
    place = command.index("-m") + 1
    stage = command[place].removeprefix("flows.")
    if stage not in NEEDED:
        return
    recipe = parser(stage).parse_args(command[place + 1 :]).recipe
    if fault := _fault(stage, recipe):
        status, text = fault
        print(f"{stage} {recipe}: {text}", file=sys.stderr)
        sys.exit(status)


def _fault(stage: str, recipe: str) -> tuple[int, str] | None:
    file = PARAMS / f"{recipe}.yaml"
    if not file.is_file():
        from params import recipe_files, suggestions  # half a second

        known = recipe_files.names(PARAMS) if PARAMS.is_dir() else []
        meant = suggestions.meant(recipe, known)
        text = f"no recipe {recipe!r}: {file} does not exist{meant}; recipes here: {known}"
        return REFUSED, text
    missing = [path for path in (each.format(recipe) for each in NEEDED[stage]) if _lacks(path)]
    if missing:
        whole = f"`make run RECIPE={recipe}` runs all stages"
        return FAILED, f"{', '.join(missing)}: missing; run the stages before first, {whole}"
    return None


def _lacks(path: str) -> bool:
    return not Path(path).exists()

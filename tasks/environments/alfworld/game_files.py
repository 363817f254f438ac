"""ALFWorld's own games, from the folder that the variable ALFWORLD_DATA names.

``alfworld-download`` puts them there: ``json_2.1.1/<split>/<task>/<trial>/`` with ``game.tw-pddl``
and ``traj_data.json``. TextWorld evaluates a game's grammar as code: take files that you trust.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.environments.alfworld.problems import TYPES

VARIABLE = "ALFWORLD_DATA"
FOLDERS = {"train": "train", "validation": "valid_seen", "test": "valid_unseen"}
TASK = re.compile(r"Your task is to: (.*?)\.?\\?\"")


def folder() -> Path | None:
    """Return the folder that the variable names, or None."""
    given = os.environ.get(VARIABLE, "")
    return Path(given) if given else None


def listed(split: str, count: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Draw ``count`` games of a split; return type of task, and data that name file and digest.

    Raises ValueError where the folder has too few games that the engine can play.
    """
    root = folder()
    if root is None:
        raise ValueError(
            f"environment.household.games is alfworld, and {VARIABLE} is not set: set it to the "
            "folder that alfworld-download has filled, or set games to made"
        )
    split_folder = root / "json_2.1.1" / FOLDERS[split]
    files = sorted(split_folder.glob("*/*/game.tw-pddl"))
    random.Random(f"{seed}/{split}").shuffle(files)
    games: list[tuple[str, dict[str, Any]]] = []
    for file in files:
        if len(games) == count:
            break
        if kind := _kind(file):
            name = str(file.relative_to(root))
            games.append((kind, {"file": name, "digest": _digest(file.read_bytes())}))
    if len(games) < count:
        raise ValueError(
            f"{split_folder} has {len(games)} games that can be played, and {count} are asked for "
            f"({split}): lower prepare.questions.{split}, or fetch the games with alfworld-download"
        )
    return games


def _kind(file: Path) -> str | None:
    """Return the type of a game, or None where the engine cannot play it."""
    traced = json.loads((file.parent / "traj_data.json").read_text())
    game = json.loads(file.read_text())
    sliced = traced.get("pddl_params", {}).get("object_sliced", False)
    return TYPES.get(traced["task_type"]) if game.get("solvable") and not sliced else None


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def read(data: Mapping[str, Any]) -> dict[str, str]:
    """Return ``problem``, ``domain``, ``grammar`` and ``task`` of the game that ``data`` name.

    Raises ValueError where the file is missing or has changed since the tasks were made.
    """
    root = folder()
    file = (root or Path()) / data["file"]
    if root is None or not file.is_file():
        raise ValueError(
            f"the game {data['file']} is not there: set {VARIABLE} to the folder that has it"
        )
    content = file.read_bytes()
    if _digest(content) != data["digest"]:
        raise ValueError(f"{file} has changed since the tasks were made: run prepare again")
    game = json.loads(content)
    task = TASK.search(game["grammar"])
    if task is None:
        raise ValueError(f"{file}: its grammar does not say what the task is")
    return {
        "problem": game["pddl_problem"],
        "domain": game["pddl_domain"],
        # one text for all games, so that it is parsed once
        "grammar": game["grammar"].replace(task[1], "UNKNOWN GOAL"),
        "task": task[1],
    }

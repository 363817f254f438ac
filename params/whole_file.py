"""Which file has all of a recipe: its own, or the generated one that a recipe with a base has.

Importing this takes no time; params/recipe_files.py, which writes these files, takes half a second.
"""

from __future__ import annotations

from pathlib import Path

BASE = "base"  # the key that names another recipe
LARGEST = 2**17  # characters that are read; params/strict_yaml.py refuses a larger file
RESOLVED = "resolved"  # folder of the generated files, below params/


def whole_file(name: str, folder: Path) -> Path:
    """Return the file with the whole recipe, which DVC reads; it may not be up to date."""
    file = folder / f"{name}.yaml"
    return folder / RESOLVED / file.name if file.exists() and says_base(file) else file


def says_base(file: Path) -> bool:
    """Return whether a file of params/ names a base; the file may be unsound."""
    if not file.is_file():  # a pipe would never end
        return False
    with file.open(encoding="utf-8-sig", errors="replace") as text:
        lines = text.read(LARGEST).splitlines()
    return any(line.startswith(f"{BASE}:") for line in lines)

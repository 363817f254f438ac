"""The list of recipes in dvc.yaml, from which DVC makes every stage once for each recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from flows.host import files

PIPELINE = Path("dvc.yaml")
LOCK = Path(".beamline/recipes.lock")


def add_to_pipeline(recipe: str) -> bool:
    """Add a recipe to the list in dvc.yaml; return whether it had to be added.

    Comments, layout and order stay, and the file is replaced in one step. A dvc.yaml without such a
    list stays as it is.
    """
    with files.locked(LOCK):
        text = PIPELINE.read_text()
        extended = _extended(text, recipe)
        if extended == text:
            return False
        with files.replaced(PIPELINE) as partial:
            partial.write_text(extended)
        return True


def _extended(text: str, recipe: str) -> str:
    """Return the text of a dvc.yaml with the recipe as last entry of its list."""
    node = _list_of_recipes(text)
    if node is None or not node.value or recipe in [entry.value for entry in node.value]:
        return text
    last = node.value[-1]
    quoted = yaml.safe_dump(recipe).splitlines()[0]  # '1e3' is a number without quotes
    if node.flow_style:
        end = last.end_mark.index
        return f"{text[:end]}, {quoted}{text[end:]}"
    lines = text.splitlines(keepends=True)
    at = last.start_mark.line
    dash = lines[at][: last.start_mark.column]
    lines[at] = lines[at].rstrip("\n") + "\n"
    return "".join([*lines[: at + 1], f"{dash}{quoted}\n", *lines[at + 1 :]])


def _list_of_recipes(text: str) -> Any:
    """Return the YAML node of ``recipes`` below ``vars``; None where there is none."""
    top = yaml.compose(text, Loader=yaml.SafeLoader)
    for entry in getattr(_value(top, "vars"), "value", []):
        if isinstance(node := _value(entry, "recipes"), yaml.SequenceNode):
            return node
    return None


def _value(node: yaml.Node | None, key: str) -> yaml.Node | None:
    """Return the value of a mapping's key; None for another node or without the key."""
    entries = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for name, value in entries if name.value == key), None)

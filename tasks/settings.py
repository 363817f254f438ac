"""Recipes with the settings of their tools: each tool's file declares its own.

Adding a tool to tasks/tools adds its section here; nothing else lists tools.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from pydantic import create_model, model_validator

from params.schema import recipe as schema
from params.schema.base import PARAMS, Frozen
from params.schema.recipe import Recipe
from tasks.tools import TOOLS


def load(name: str, folder: Path = PARAMS) -> Recipe:
    """Read and check ``<folder>/<name>.yaml``, tools included.

    Raises ValueError with file, key and remedy, all faults at once.
    """
    return schema.load(name, WholeRecipe, folder)


@model_validator(mode="after")
def _check_tools(recipe: Any) -> Any:
    """Raise ValueError for tools that do not fit the recipe's questions."""
    faults = [
        fault
        for name, settings in recipe.tool_settings.items()
        for fault in TOOLS[name].faults(settings, recipe.prepare.questions.source)
    ]
    if not recipe.tool_settings:
        faults.append("tools is empty: give at least one, such as python")
    if faults:
        raise ValueError("; ".join(faults))
    return recipe


def _optional(kind: type[Frozen]) -> Any:
    return (kind | None, None)


Tools = create_model(
    "Tools", __base__=Frozen, **{name: _optional(kind.settings) for name, kind in TOOLS.items()}
)
WholeRecipe = cast(
    type[Recipe],
    create_model(
        "Recipe",
        __base__=Recipe,
        __validators__={"_tools_fit": cast(Any, _check_tools)},
        tools=(Tools, ...),
    ),
)

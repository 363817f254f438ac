"""Recipes with the settings of their tools, which the file of each tool declares.

A tool that is added to TOOLS (tasks/tools) gets its key in the section ``tools`` by itself.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import Field, create_model, model_validator

from params import overrides, strict_yaml
from params.schema import recipe as schema
from params.schema.base import PARAMS, Frozen
from params.schema.recipe import Recipe
from tasks.tools import TOOLS, ToolKind


def load(name: str, folder: Path = PARAMS) -> Recipe:
    """Read and check ``<folder>/<name>.yaml``, the settings of its tools included.

    Raises ValueError with file, key, value and remedy, one line for each fault.
    """
    return schema.load(name, WholeRecipe, folder)


def load_changed(name: str, changes: Sequence[str], folder: Path = PARAMS) -> Recipe:
    """Read and check a recipe with ``changes``, each ``section.key=value``, and keep its file.

    Raises ValueError as ``load`` and ``overrides.apply`` do.
    """
    if not changes:
        return load(name, folder)
    for file in folder.glob("*.yaml"):
        strict_yaml.check_regular(file)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(shutil.copytree(folder, Path(temporary, "params")))
        try:
            if (copy / f"{name}.yaml").is_file():
                overrides.apply(changes, copy / f"{name}.yaml")
            return load(name, copy)
        except ValueError as error:
            raise ValueError(str(error).replace(str(copy), str(folder))) from None


def with_tools(kinds: Mapping[str, ToolKind]) -> type[Recipe]:
    """Return the model of a recipe in which the section ``tools`` has these kinds of tools."""

    @model_validator(mode="after")
    def check_tools(recipe: Any) -> Any:
        source = recipe.prepare.questions.source
        given = recipe.tool_settings
        faults = [line for name in given for line in kinds[name].faults(given[name], source)]
        if not given:
            faults.append(f"tools is empty: give at least one of {list(kinds)}")
        if faults:
            raise ValueError("; ".join(faults))
        return recipe

    # A tool that is not given is not dumped either, so a further kind of tool changes no stage key.
    absent = Field(None, exclude_if=lambda settings: settings is None)
    settings: dict[str, Any] = {n: (kind.settings | None, absent) for n, kind in kinds.items()}
    tools = create_model("Tools", __base__=Frozen, **settings)
    whole = create_model(
        "Recipe",
        __base__=Recipe,
        __validators__={"_tools_fit": cast(Any, check_tools)},
        tools=(tools, ...),
    )
    return cast(type[Recipe], whole)


WholeRecipe = with_tools(TOOLS)

"""The recipes of the pipeline, from which DVC makes every stage once for each.

Those that come with Beamline stand in dvc.yaml, below ``vars``. Those of a user stand in
params.yaml, which DVC reads beside it, so that dvc.yaml stays as it came. Each has the file that
its values are read from.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from flows.host import files
from params.whole_file import whole_file

PIPELINE = Path("dvc.yaml")
OWN = Path("params.yaml")
LOCK = Path(".beamline/recipes.lock")
KEY = "recipes"
HEAD = (
    "# Recipes of your own, each with the file that has all of it; dvc.yaml has the others, and\n"
    "# DVC reads both. `make new NAME=<name>` and `make run RECIPE=<name>` add a recipe.\n"
)


def write(recipe: str) -> Iterator[str]:
    """Write the whole file and the entry of the pipeline; yield a line for each that changed.

    Raises ValueError, before anything is written, for a name that is no recipe's.
    """
    from params import recipe_files  # half a second, which not every caller has spent

    params = Path("params")
    recipe_files.check_name(recipe, params)
    listed = add_to_pipeline(recipe)
    whole = whole_file(recipe, params)
    if recipe_files.refresh(recipe, params):
        yield f"wrote {whole}" if whole.parent != params else f"removed the whole file of {recipe}"
    if listed:
        yield f"listed {recipe} in {listed}"


def add_to_pipeline(recipe: str) -> Path | None:
    """List a recipe with its file; return the file that was changed for it, or None.

    Comments, layout and order stay, and the file is replaced in one step. Beside a dvc.yaml without
    such a list nothing is changed. Raises ValueError for a file that is no YAML, for a dvc.yaml of
    an earlier version, and for a recipe that both files list.
    """
    whole = whole_file(recipe, Path("params")).as_posix()
    with files.locked(LOCK):
        ours = _recipes(PIPELINE)
        if ours is None:
            return None
        if twice := sorted(_names(ours) & _names(_recipes(OWN))):
            raise ValueError(
                f"{OWN} lists {', '.join(twice)}, and so does {PIPELINE}, which DVC refuses: "
                f"rename params/{twice[0]}.yaml if it is yours, and correct {OWN}"
            )
        file = PIPELINE if _value(ours, recipe) else OWN
        text = file.read_text() if file.exists() else HEAD
        changed = _listed(text, _recipes(file), recipe, whole)
        if changed == text:
            return None
        with files.replaced(file) as partial:
            partial.write_text(changed)
        return file


def _listed(text: str, recipes: yaml.MappingNode | None, recipe: str, whole: str) -> str:
    """Return the text with an entry for a recipe among ``recipes``."""
    entry = yaml.safe_dump({recipe: whole}, width=10_000).strip()  # '1e3' gets quotes
    if known := recipes and _value(recipes, recipe):
        begin, end = known.start_mark.index, known.end_mark.index
        return text if known.value == whole else f"{text[:begin]}{whole}{text[end:]}"
    if recipes is None:
        return f"{text.rstrip()}\n{KEY}:\n  {entry}\n"
    if recipes.flow_style:
        at = recipes.end_mark.index - 1
        return f"{text[:at].rstrip()}{', ' if recipes.value else ''}{entry}{text[at:]}"
    lines = text.splitlines()
    last = recipes.value[-1][1].end_mark.line
    column = recipes.start_mark.column
    return "\n".join([*lines[: last + 1], f"{' ' * column}{entry}", *lines[last + 1 :], ""])


def _recipes(file: Path) -> yaml.MappingNode | None:
    """Return the YAML node of the recipes in dvc.yaml or params.yaml; None where there is none."""
    try:
        top = yaml.compose(file.read_text(), Loader=yaml.SafeLoader) if file.exists() else None
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from None
    variables = _value(top, "vars") if file == PIPELINE else None
    places = variables.value if isinstance(variables, yaml.SequenceNode) else [top]
    nodes = [_value(place, KEY) for place in places]
    if file == PIPELINE and any(isinstance(node, yaml.SequenceNode) for node in nodes):
        raise ValueError(
            f"{file} lists recipes as versions before 0.8.0 did: take that of the new version, "
            f"without recipes of yours, which {OWN} gets (docs/runs.md#new-versions)"
        )
    return next((node for node in nodes if isinstance(node, yaml.MappingNode)), None)


def _names(recipes: yaml.MappingNode | None) -> set[str]:
    return {name.value for name, _ in recipes.value} if recipes else set()


def _value(node: yaml.Node | None, key: str) -> yaml.Node | None:
    """Return the value of a mapping's key; None for another node or without the key."""
    entries = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for name, value in entries if name.value == key), None)

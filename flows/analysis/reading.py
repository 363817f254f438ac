"""Read the turns of a run as its recipe's dialect does, and name what is missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, chdir
from functools import partial
from pathlib import Path
from typing import Any

from flows.runs.without_run import remedy
from params import suggestions
from params.recipe_files import names, read
from params.run_folders import RunFolders
from tasks import recipes
from tasks.dialects.contract import calls_in
from tasks.dialects.tags import TagsReader
from tasks.trees.dialogue import OTHER_TAGS
from tasks.trees.tree import Call, ToolSpec

ReadCalls = Callable[[str], Sequence[Call]]  # the text of a turn -> the calls that it ends with

Decode = Callable[[list[int]], str]

BROKEN = "\N{REPLACEMENT CHARACTER}"  # in a decoded text: part of a character
LONGEST = 4  # tokens that share a character, at most: one a byte
CLOSING = re.compile(r"</([A-Za-z][\w-]*)>(?!.*</)", re.DOTALL)  # the last tag of a turn


def missing(recipe: str, file: Path) -> ValueError:
    """Return the error for a file of a run that is not there: the file, and what makes it."""
    recipes = Path(*file.parts[: file.parts.index(recipe) - 1], "params")
    if not (recipes / f"{recipe}.yaml").is_file():
        known = names(recipes)
        meant, listed = suggestions.meant(recipe, known), ", ".join(known) or "name a checkout"
        return ValueError(f"no recipe '{recipe}' in {recipes}{meant}: {listed}")
    return ValueError(f"{file} does not exist: {remedy(recipe)}")


def call_reader(recipe: str, turns: Sequence[str], project: Path) -> ReadCalls:
    """Return what finds the calls in the text of a turn.

    ``turns`` are turns that called: in the dialect of tags, the tag that a turn ends with is its
    tool's. Another dialect is opened with the tokenizer and the tools of the recipe.
    """
    written = read(recipe, project / "params")
    if [*written.get("dialect", {})] == ["tags"]:
        ends = {matched[1] for turn in turns if (matched := CLOSING.search(turn))}
        return TagsReader(sorted(ends - {*OTHER_TAGS})).calls
    return partial(calls_in, open_reader(recipe, project))


def open_reader(recipe_name: str, project: Path, specs: Sequence[ToolSpec] | None = None) -> Any:
    """Return the recipe's dialect for the trained policy's tokenizer.

    ``specs`` are the agent's tools; None: they are opened to ask them.
    """
    from tasks.dialects import open_dialect  # with transformers, which takes seconds to import
    from tasks.policy.load_model import load_tokenizer

    folder = project / "models" / recipe_name / "trained"
    if not folder.is_dir():
        raise missing(recipe_name, folder)
    with chdir(project):  # a recipe names files of its own below the current folder
        recipe = recipes.load(recipe_name, Path("params"))
        told = specs_of(recipe_name, project=Path()) if specs is None else specs
        tokenizer = load_tokenizer(str(folder.relative_to(project)))
        return open_dialect(recipe.dialect, tokenizer, recipe.dialogue, told)


def specs_of(recipe_name: str, project: Path) -> list[ToolSpec]:
    """Return what the agent of a recipe is told about its tools and the acts of its world.

    Tools are opened for it, since a server tells its own; no world is.
    """
    from tasks.environments import open_environment
    from tasks.environments.own_world import environment_kind

    with chdir(project), ExitStack() as stack:
        recipe = recipes.load(recipe_name, Path("params"))
        acts = [
            spec
            for name, section in recipe.environment.items()
            for spec in environment_kind(name).specs(section)
        ]
        if not recipe.tools:
            return acts
        corpus = RunFolders(recipe_name).corpus
        opened = open_environment(recipe.tools, {}, 1, corpus)
        return [*acts, *stack.enter_context(opened).specs]


def token_texts(recipe: str, tokens: Sequence[int], project: Path) -> list[str | None]:
    """Return the text of each token alone; None where the trained policy has no tokenizer file."""
    decode = open_decoder(recipe, project)
    return [decode([token]) if decode else None for token in tokens]


def open_decoder(recipe: str, project: Path) -> Decode | None:
    """Return what turns tokens into text; None where the trained policy has no tokenizer file."""
    from tokenizers import Tokenizer

    file = project / "models" / recipe / "trained" / "tokenizer.json"
    if not file.is_file():
        return None
    return partial(Tokenizer.from_file(str(file)).decode, skip_special_tokens=False)


def spelled(decode: Decode, tokens: list[int]) -> list[str]:
    """Return the text of each token of a sequence.

    A character whose bytes several tokens share belongs to the last of them.
    """
    texts, start = [], 0
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[start:end])
        whole = not text.endswith(BROKEN) or end - start == LONGEST or end == len(tokens)
        texts.append(text if whole else "")
        start = end if whole else start
    return texts

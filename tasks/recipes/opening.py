"""Open what a recipe's agent acts in, and what reads its turns."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from params.schema.recipe import Recipe
from tasks.environments import open_environment
from tasks.environments.contract import OpenEnvironment
from tasks.rewards.scoring import Reader


def open_recipe(recipe: Recipe, corpus: Path) -> AbstractContextManager[OpenEnvironment]:
    """Open the tools and the world of a recipe; ``corpus`` is the folder of its documents.

    Raises RuntimeError and ValueError as ``open_environment``.
    """
    return open_environment(recipe.tools, recipe.environment, recipe.machine.threads, corpus)


def reader_of(recipe: Recipe, policy: Path | str, environment: OpenEnvironment) -> Reader:
    """Return what reads the turns of a policy: the recipe's dialect, for its tokenizer."""
    from tasks.dialects import open_dialect  # with transformers, which takes seconds to import
    from tasks.policy.load_model import load_tokenizer

    tokenizer = load_tokenizer(str(policy))
    return open_dialect(recipe.dialect, tokenizer, recipe.dialogue, environment.specs)

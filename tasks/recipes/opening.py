"""Open what a recipe's agent acts in, and what reads its turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from params.schema.recipe import Recipe
from tasks.environments import open_environment
from tasks.environments.contract import OpenEnvironment
from tasks.programs.opening import open_program
from tasks.rewards.scoring import Reader


@contextmanager
def open_recipe(recipe: Recipe, corpus: Path) -> Iterator[OpenEnvironment]:
    """Open the tools, the world and the program of a recipe; ``corpus``: its documents.

    Raises RuntimeError and ValueError as ``open_environment`` and ``open_program``.
    """
    threads = recipe.machine.threads
    with (
        open_program(recipe.program) as program,
        open_environment(recipe.tools, recipe.environment, threads, corpus) as environment,
    ):
        yield replace(environment, program=program)


def reader_of(recipe: Recipe, policy: Path | str, environment: OpenEnvironment) -> Reader:
    """Return what reads the turns of a policy: the recipe's dialect, for its tokenizer."""
    from tasks.dialects import open_dialect  # with transformers, which takes seconds to import
    from tasks.policy.load_model import load_tokenizer

    tokenizer = load_tokenizer(str(policy))
    return open_dialect(recipe.dialect, tokenizer, recipe.dialogue, environment.specs)

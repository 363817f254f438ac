"""What a recipe with a program contradicts."""

from __future__ import annotations

from params.schema.algorithms import load_algorithms
from params.schema.recipe import Recipe
from tasks.programs.contract import ProgramSettings


def faults(recipe: Recipe) -> list[str]:
    """Return a line for each section that does not go with the recipe's program; [] without one."""
    if not recipe.program:
        return []
    if len(recipe.program) > 1:
        return [f"program names {' and '.join(recipe.program)}: an agent is one of them"]
    (settings,) = recipe.program.values()
    return [*_other_agents(recipe), *_limits(recipe, settings), *_branches(recipe)]


def _other_agents(recipe: Recipe) -> list[str]:
    """Return a line for each section by which another than the program would act."""
    found = []
    if recipe.environment:
        found.append(
            f"environment names {next(iter(recipe.environment))}, and program is the agent, which "
            "acts in what it has itself: set one of both to null"
        )
    if recipe.dialogue.prompt != "growing":
        found.append(
            "dialogue.prompt is fresh, and a program writes its prompts: set it to growing"
        )
    if recipe.reinforce.turns_per_policy is not None:
        found.append(
            f"reinforce.turns_per_policy is {recipe.reinforce.turns_per_policy}, and the episodes "
            "of a program cannot rest between two policies: set it to null"
        )
    return found


def _limits(recipe: Recipe, settings: object) -> list[str]:
    """Return a line where the longest request and its answer exceed the policy's context."""
    if not isinstance(settings, ProgramSettings):
        return []
    context, turn = recipe.prepare.policy.context, recipe.dialogue.turn_tokens
    if settings.prompt_tokens + turn > context:
        return [
            f"program's prompt_tokens {settings.prompt_tokens} and dialogue.turn_tokens {turn} do "
            f"not fit into prepare.policy.context {context}: lower one of the former, or raise the "
            "latter"
        ]
    return []


def _branches(recipe: Recipe) -> list[str]:
    """Return a line where the row branches, for which an episode has to go back."""
    row, name = load_algorithms().get(recipe.reinforce.algorithm), recipe.reinforce.algorithm
    (settings,) = recipe.program.values()
    if row is None or row.branching == "none":
        return []
    if not getattr(settings, "repeatable", True):
        return [
            f"reinforce.algorithm {name} branches, for which the program begins anew and asks what "
            "it asked before, and its 'repeatable' is false: take a row that does not branch"
        ]
    return []

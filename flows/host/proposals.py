"""Propose settings that make a recipe faster or smaller on a GPU, with what each gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

from flows.host.gpu_cards import Card
from flows.host.gpu_memory import fits, memory, servers
from flows.host.gpu_seconds import seconds_of
from flows.host.model_shape import shape_of, with_teacher
from flows.host.remedies import RecipeChange, remedy
from params.schema.algorithms import Algorithm
from params.schema.recipe import Recipe

EQUAL = 1.05  # two estimates that differ by less are alike


@dataclass(frozen=True)
class CardNeed:
    """What a recipe needs on a card that it fits, with changes that make it fit, if any."""

    changes: Sequence[RecipeChange]
    peak: float  # bytes
    seconds: float  # of an iteration


@dataclass(frozen=True)
class Proposal:
    """Changes that a recipe gains from, and its need with them and without."""

    changes: Sequence[RecipeChange]
    need: CardNeed
    without: CardNeed


def proposals(
    recipe: Recipe, row: Algorithm, config: Any, card: Card, network: float
) -> list[Proposal]:
    """Return what passes in bfloat16 and sampling by vLLM gain, each alone, then both.

    Nothing is proposed that the recipe has, that no setting makes fit the card, nor what saves
    neither time nor memory. ``config``: of the policy, from transformers.
    """
    machine = recipe.machine.model_copy(update={"device": "cuda"})  # which the card is for
    recipe = recipe.model_copy(update={"machine": machine})
    kinds = [kind for kind in (_half, _vllm) if kind(recipe)]
    without = _need(recipe, row, config, card, network) if kinds else None
    if without is None:
        return []
    found = []
    for chosen in chain(combinations(kinds, 1), combinations(kinds, 2)):
        changed, changes = recipe, list[RecipeChange]()
        for kind in chosen:
            if step := kind(changed):
                changed, change = step
                changes.append(change)
        need = _need(changed, row, config, card, network)
        if need and _gains(need, without):
            found.append(Proposal(changes, need, without))
    return found


def _half(recipe: Recipe) -> tuple[Recipe, RecipeChange] | None:
    if recipe.machine.precision != "float32":
        return None
    machine = recipe.machine.model_copy(update={"precision": "bfloat16"})
    changed = recipe.model_copy(update={"machine": machine})
    return changed, RecipeChange("machine.precision", "bfloat16")


def _vllm(recipe: Recipe) -> tuple[Recipe, RecipeChange] | None:
    if recipe.engine.kind == "vllm" or servers(recipe):
        return None
    engine = recipe.engine.model_copy(update={"kind": "vllm"})
    return recipe.model_copy(update={"engine": engine}), RecipeChange("engine.kind", "vllm")


def _need(
    recipe: Recipe, row: Algorithm, config: Any, card: Card, network: float
) -> CardNeed | None:
    """Return what a recipe needs, with the fewest changes that make it fit; None where none do."""
    changes: Sequence[RecipeChange] = ()
    shape = with_teacher(shape_of(config, recipe.lora), recipe)
    if not fits(recipe, row, shape, card):
        found = remedy(recipe, row, config, card)
        if found is None:
            return None
        recipe, changes = found.recipe, found.changes
        shape = with_teacher(shape_of(config, recipe.lora), recipe)
    seconds = seconds_of(recipe, row, shape, card, network).total
    return CardNeed(changes, memory(recipe, row, shape, card).peak, seconds)


def _gains(need: CardNeed, without: CardNeed) -> bool:
    """Return whether it is faster, or as fast with less memory, without more other changes."""
    if len(need.changes) > len(without.changes) + 1:  # the share of vLLM is one
        return False
    faster = need.seconds * EQUAL < without.seconds
    as_fast = need.seconds < EQUAL * without.seconds
    return faster or (as_fast and need.peak * EQUAL < without.peak)

"""Search the fewest changes of a recipe that make it fit a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from flows.host.gpu_cards import Card
from flows.host.gpu_memory import fits, has_share, memory, servers
from flows.host.model_shape import Shape, shape_of, with_teacher
from params.schema.algorithms import Algorithm
from params.schema.recipe import Recipe
from params.schema.reinforce import Lora
from tasks.engines import ENGINES

LORA = Lora(  # the advice: on every linear layer
    rank=32,
    alpha=64,
    modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)


@dataclass(frozen=True)
class RecipeChange:
    """A new value for a key of a recipe."""

    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.key}: {self.value}"

    @property
    def short(self) -> str:
        """The key alone where the value is a mapping."""
        return self.key if self.value.startswith("{") else str(self)


Candidate = tuple[Recipe, RecipeChange]
Kind = Callable[[Recipe, Card], Iterator[Candidate]]  # yields the recipe with each value of a key


@dataclass(frozen=True)
class Remedy:
    """Changes that make a recipe fit, the bytes that it needs then, and the recipe with them."""

    changes: Sequence[RecipeChange]
    peak: float
    recipe: Recipe


def remedy(recipe: Recipe, row: Algorithm, config: Any, card: Card) -> Remedy | None:
    """Return the fewest changes that make the recipe fit the card, or None.

    Of equally many, the first in the order of CHANGES: changes that affect no result come first.
    """
    shapes = {lora: with_teacher(shape_of(config, lora), recipe) for lora in {recipe.lora, LORA}}
    for count in range(1, len(CHANGES) + 1):
        for kinds in combinations(CHANGES, count):
            for changed, changes in _settings(recipe, kinds, card):
                shape = shapes[changed.lora]
                if fits(changed, row, shape, card):
                    return Remedy(changes, memory(changed, row, shape, card).peak, changed)
    return _more_processes(recipe, row, shapes[recipe.lora], card)


def _more_processes(recipe: Recipe, row: Algorithm, shape: Shape, card: Card) -> Remedy | None:
    """Return the fewest processes, each with such a card, that make the recipe fit."""
    for count in PROCESSES:
        machine = recipe.machine.model_copy(update={"processes": count})
        change = RecipeChange("machine.processes", str(count))
        shared = recipe.model_copy(update={"machine": machine})
        for beside in range(len(SPARING) + 1):
            for kinds in combinations(SPARING, beside):
                for changed, changes in _settings(shared, kinds, card):
                    if count > recipe.machine.processes and fits(changed, row, shape, card):
                        peak = memory(changed, row, shape, card).peak
                        return Remedy([change, *changes], peak, changed)
    return None


def _settings(
    recipe: Recipe, kinds: Sequence[Kind], card: Card
) -> Iterator[tuple[Recipe, list[RecipeChange]]]:
    """Yield the recipe with one change of each of these kinds, for all their values."""
    if not kinds:
        yield recipe, []
        return
    for changed, change in kinds[0](recipe, card):
        for further, changes in _settings(changed, kinds[1:], card):
            yield further, [change, *changes]


def _share(recipe: Recipe, card: Card) -> Iterator[Candidate]:
    """Yield other shares of the card for vLLM, the largest first."""
    for hundredths in range(90, 0, -5) if has_share(recipe) else ():
        if hundredths / 100 != recipe.engine.memory:
            engine = recipe.engine.model_copy(update={"memory": hundredths / 100})
            changed = recipe.model_copy(update={"engine": engine})
            yield changed, RecipeChange("engine.memory", f"{hundredths / 100:g}")


def _elsewhere(recipe: Recipe, card: Card) -> Iterator[Candidate]:
    """Yield a server elsewhere, so that the stage holds no policy and no vLLM."""
    if recipe.engine.kind == "vllm" and not servers(recipe):
        engine = recipe.engine.model_copy(update={"servers": ("http://HOST:8000",)})
        changed = recipe.model_copy(update={"engine": engine})
        yield changed, RecipeChange("engine.servers", '["http://HOST:8000"]')


def _rows(recipe: Recipe, card: Card) -> Iterator[Candidate]:
    """Yield fewer paths sampled at once: whole questions."""
    rollout = recipe.reinforce.rollout
    if ENGINES[recipe.engine.kind].reserve is None:
        for questions in range(rollout.rows // rollout.leaves - 1, 0, -1):
            rows = questions * rollout.leaves
            yield (
                _reinforce(recipe, rollout=rollout.model_copy(update={"rows": rows})),
                RecipeChange("reinforce.rollout.rows", str(rows)),
            )


def _micro_batch(recipe: Recipe, card: Card) -> Iterator[Candidate]:
    """Yield halved micro-batches as long as the longest path fits."""
    update = recipe.reinforce.update
    for tokens in _halves(update.micro_batch_tokens, recipe.prepare.policy.context):
        yield (
            _reinforce(recipe, update=update.model_copy(update={"micro_batch_tokens": tokens})),
            RecipeChange("reinforce.update.micro_batch_tokens", str(tokens)),
        )


def _model_micro_batch(recipe: Recipe, card: Card) -> Iterator[Candidate]:
    """Yield halved micro-batches of the reward model as long as the longest path fits."""
    if reward_model := recipe.reward_model:
        for tokens in _halves(reward_model.micro_batch_tokens, recipe.prepare.policy.context):
            model = reward_model.model_copy(update={"micro_batch_tokens": tokens})
            changed = recipe.model_copy(update={"reward_model": model})
            yield changed, RecipeChange("reward_model.micro_batch_tokens", str(tokens))


def _halves(tokens: int, least: int) -> Iterator[int]:
    """Yield a half, a quarter and so on, not below ``least``."""
    while (tokens := tokens // 2) >= least:
        yield tokens


def _recompute(recipe: Recipe, card: Card) -> Iterator[Candidate]:
    update = recipe.reinforce.update
    if not update.recompute:
        yield (
            _reinforce(recipe, update=update.model_copy(update={"recompute": True})),
            RecipeChange("reinforce.update.recompute", "true"),
        )


def _precision(recipe: Recipe, card: Card) -> Iterator[Candidate]:
    if recipe.machine.precision == "float32":
        machine = recipe.machine.model_copy(update={"precision": "bfloat16"})
        change = RecipeChange("machine.precision", "bfloat16")
        yield recipe.model_copy(update={"machine": machine}), change


def _lora(recipe: Recipe, card: Card) -> Iterator[Candidate]:
    if recipe.lora is None:
        text = f"{{rank: {LORA.rank}, alpha: {LORA.alpha:g}, modules: [{', '.join(LORA.modules)}]}}"
        yield recipe.model_copy(update={"lora": LORA}), RecipeChange("lora", text)


def _reinforce(recipe: Recipe, **sections: Any) -> Recipe:
    return recipe.model_copy(update={"reinforce": recipe.reinforce.model_copy(update=sections)})


CHANGES: tuple[Kind, ...] = (
    _share,
    _rows,
    _recompute,
    _micro_batch,
    _model_micro_batch,
    _precision,
    _lora,
)
# Where no setting of one card helps: processes, and what saves memory beside them.
PROCESSES = (2, 4, 8, 16, 32, 64)
SPARING: tuple[Kind, ...] = (_elsewhere, _share, _recompute, _micro_batch, _model_micro_batch)

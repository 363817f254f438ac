"""Add up the gradients of forests, and take optimizer steps. Torch only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from params.schema.base import Machine
from params.schema.reinforce import Update
from tasks.learning.attention import attending, form_of
from tasks.learning.packing import Credited, Forest
from tasks.learning.passes import forests_of_lanes, training_cost
from tasks.policy import sharding, world
from tasks.policy.parallel import side_by_side
from tasks.policy.resident import Learner

OF_AN_UPDATE = "reinforce.update.learning_rate, or look at the newest trees in the ledger"


def accumulate(
    learner: Learner,
    trees: Sequence[Credited],
    share: Callable[[Forest], tuple[Tensor, dict[str, float]]],
    settings: Update,
    machine: Machine,
) -> list[dict[str, float]]:
    """Compute the gradient of a step's loss over all leaves; return the metrics of each forest.

    ``share``: forest -> its share of the loss, and metrics.
    """
    assert learner.optimizer, "prepare_optimizer comes first"
    learner.optimizer.zero_grad(set_to_none=True)
    form = form_of(learner.model, machine.device)
    batch = [(tree, range(len(tree.credits))) for tree in trees]
    with attending(learner.model, form):
        cost = training_cost(learner.model, form)
        pieces = forests_of_lanes(batch, settings.micro_batch_tokens, cost, machine)
        return add_gradients(weights_of(learner.optimizer), share, pieces)


def weights_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def add_gradients(
    weights: Sequence[Tensor],
    share: Callable[[Forest], tuple[Tensor, dict[str, float]]],
    pieces: Sequence[Iterable[Forest]],
) -> list[dict[str, float]]:
    """Add the gradients of each forest's share of the loss to the weights; return metrics of each.

    ``share``: forest -> scalar loss and metrics. ``pieces``: lane -> its forests. Several lanes
    each sum their own gradients, which are then added in the order of the lanes, so that equal runs
    stay equal. Processes that learn together have one lane each; all get the metrics of all.
    """
    if len(pieces) == 1:
        metrics_of_forests = []
        for forest in pieces[0]:
            value, metrics = share(forest)
            (value * 0 if forest.spare else value).backward()
            if not forest.spare:
                metrics_of_forests.append({"loss": float(value.detach()), **metrics})
        return [
            metrics for of_process in world.gathered(metrics_of_forests) for metrics in of_process
        ]

    def lane(forests: Iterable[Forest]) -> tuple[list[Tensor | None], list[dict[str, float]]]:
        total: list[Tensor | None] = [None] * len(weights)
        metrics_of_forests = []
        for forest in forests:
            value, metrics = share(forest)
            gradients = torch.autograd.grad(value, list(weights), allow_unused=True)
            total = [_plus(one, other) for one, other in zip(total, gradients, strict=True)]
            metrics_of_forests.append({"loss": float(value.detach()), **metrics})
        return total, metrics_of_forests

    done = side_by_side(lane, pieces)
    for total, _ in done:
        for weight, gradient in zip(weights, total, strict=True):
            weight.grad = _plus(weight.grad, gradient)
    return [metrics for _, of_forests in done for metrics in of_forests]


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Add two gradients, in place of the first; None is a gradient of zeros."""
    if one is None or other is None:
        return other if one is None else one
    return one.add_(other)


def apply_gradients(learner: Learner, settings: Update, to_lower: str = OF_AN_UPDATE) -> float:
    """Clip gradients, warm up, step; return the gradient norm before clipping.

    Raises RuntimeError if the norm is not finite, with what the user may lower or look at.
    """
    assert learner.optimizer
    weights = weights_of(learner.optimizer)
    norm = float(sharding.whole(torch.nn.utils.clip_grad_norm_(weights, settings.gradient_clip)))
    if not math.isfinite(norm):
        raise RuntimeError(
            f"the gradient of update {learner.updates + 1} is {norm}: lower {to_lower}"
        )
    learner.updates += 1
    share = min(1.0, learner.updates / max(1, settings.warmup_updates))
    for group in learner.optimizer.param_groups:
        group["lr"] = settings.learning_rate * share
    learner.optimizer.step()
    return norm

"""Turn the names in a row of params/algorithms.yaml into functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from params.schema.algorithms import Algorithm, ClipRange, ImportanceChoice, Kl
from tasks.learning.estimators import Advantages, Estimator, Group, critic, group, step, tree_credit

if TYPE_CHECKING:
    from tasks.learning import importance, losses  # with torch, which figures do without


@dataclass(frozen=True)
class Assembled:
    """An algorithm whose names have been turned into functions."""

    estimator: Callable[[Sequence[Group]], Advantages]
    loss: losses.Loss


ESTIMATORS: dict[str, Estimator] = {
    "none": group.nothing,
    "return": group.returns,
    "group_relative": group.group_relative,
    "leave_one_out": group.leave_one_out,
    "mean_relative": group.mean_relative,
    "part_relative": group.part_relative,
    "batch_whitened": group.batch_whitened,
    "gae": critic.gae,
    "two_level": step.two_level,
    "grouped_gae": step.grouped_gae,
    "prefix_calibrated": tree_credit.prefix_calibrated,
    "rollout_relative": tree_credit.rollout_relative,
    "tree_value": tree_credit.tree_value,
}
CREDITED = {  # what an estimator gives one advantage to
    "none": "leaf",
    "return": "leaf",
    "group_relative": "leaf",
    "leave_one_out": "leaf",
    "mean_relative": "leaf",
    "part_relative": "leaf",
    "batch_whitened": "token",
    "gae": "token",
    "two_level": "step",
    "grouped_gae": "step",
    "prefix_calibrated": "token",
    "rollout_relative": "leaf",
    "tree_value": "token",
}
# a group's advantages have mean 0, one a leaf
CENTRED = ("none", "group_relative", "leave_one_out", "mean_relative", "part_relative")


def assemble(row: Algorithm, response_tokens: int) -> Assembled:
    """Return the functions that a row names; ``response_tokens`` is the response budget."""
    from tasks.learning import losses, objectives

    estimate = ESTIMATORS[row.estimator.kind]
    return Assembled(
        estimator=lambda groups: estimate(groups, row.estimator),
        loss=losses.Loss(
            ratio=_ratio(row),
            clip=objectives.Clip(*_ends(row.clip), row.clip.dual) if row.clip else None,
            averaging=losses.AVERAGINGS[row.averaging](response_tokens),
            kl=_kl_in_the_loss(row.kl),
            entropy_bonus=row.entropy_bonus,
            importance=_importance(row.importance),
            objective=objectives.OBJECTIVES[row.objective.kind](**row.objective.settings()),
        ),
    )


def _ratio(row: Algorithm) -> losses.ImportanceRatio:
    from tasks.learning import losses

    ratio = losses.RATIOS[row.ratio]
    return ratio if row.against == "old" else replace(ratio, old=losses.AGAINST[row.against])


def _ends(clip: ClipRange) -> tuple[float, float]:
    return math.inf if clip.low is None else clip.low, clip.high


def _importance(choice: ImportanceChoice) -> importance.Importance:
    from tasks.learning import importance

    mask = None
    if bounds := choice.mask:
        mask = importance.Bounds(importance.MEASURES[bounds.kind], bounds.low, bounds.high)
    weight = None if choice.weight == "none" else importance.WEIGHTS[choice.weight]
    return importance.Importance(weight, choice.cap, mask, choice.negative)


def _kl_in_the_loss(kl: Kl | None) -> losses.KlPenalty | None:
    if kl is None or kl.place != "loss":
        return None
    from tasks.learning import losses

    return losses.KlPenalty(losses.KL_ESTIMATORS[kl.estimator], kl.coefficient)

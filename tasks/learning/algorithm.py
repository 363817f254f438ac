"""Turn the names in a row of params/algorithms.yaml into functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from params.schema.algorithms import Algorithm, Kl
from tasks.learning.estimators import Advantages, Estimator, Group, critic, group, step, tree_credit

if TYPE_CHECKING:
    from tasks.learning import losses  # with torch, which figures do without


@dataclass(frozen=True)
class Assembled:
    """An algorithm whose names have been turned into functions."""

    estimator: Callable[[Sequence[Group]], Advantages]
    loss: losses.Loss


ESTIMATORS: dict[str, Estimator] = {
    "return": group.returns,
    "group_relative": group.group_relative,
    "leave_one_out": group.leave_one_out,
    "batch_whitened": group.batch_whitened,
    "gae": critic.gae,
    "two_level": step.two_level,
    "grouped_gae": step.grouped_gae,
    "prefix_calibrated": tree_credit.prefix_calibrated,
    "tree_value": tree_credit.tree_value,
}
CREDITED = {  # what an estimator gives one advantage to
    "return": "leaf",
    "group_relative": "leaf",
    "leave_one_out": "leaf",
    "batch_whitened": "token",
    "gae": "token",
    "two_level": "step",
    "grouped_gae": "step",
    "prefix_calibrated": "token",
    "tree_value": "token",
}
CENTRED = ("group_relative", "leave_one_out")  # a group's advantages have mean 0, one a leaf


def assemble(row: Algorithm, response_tokens: int) -> Assembled:
    """Return the functions that a row names; ``response_tokens`` is the response budget."""
    from tasks.learning import losses

    estimate = ESTIMATORS[row.estimator.kind]
    return Assembled(
        estimator=lambda groups: estimate(groups, row.estimator),
        loss=losses.Loss(
            ratio=losses.RATIOS[row.ratio],
            clip=losses.Clip(row.clip.low, row.clip.high, row.clip.dual) if row.clip else None,
            averaging=losses.AVERAGINGS[row.averaging](response_tokens),
            kl=_kl_in_the_loss(row.kl),
            entropy_bonus=row.entropy_bonus,
            importance_cap=row.importance_cap,
        ),
    )


def _kl_in_the_loss(kl: Kl | None) -> losses.KlPenalty | None:
    if kl is None or kl.place != "loss":
        return None
    from tasks.learning import losses

    return losses.KlPenalty(losses.KL_ESTIMATORS[kl.estimator], kl.coefficient)

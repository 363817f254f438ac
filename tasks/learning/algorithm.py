"""A row of params/algorithms.yaml, and the functions that its choices name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from params.schema.algorithms import Algorithm, Kl
from tasks.learning import losses
from tasks.learning.estimators import Estimator, group, step, tree
from tasks.learning.estimators import critic as critics


@dataclass(frozen=True)
class Assembled:
    """An algorithm whose names have been turned into functions."""

    estimator: Estimator
    loss: losses.Loss


ESTIMATORS: dict[str, Callable[[Any], Estimator]] = {
    "return": lambda choice: group.returns(),
    "group_relative": lambda choice: group.group_relative(choice.std),
    "leave_one_out": lambda choice: group.leave_one_out(),
    "batch_whitened": lambda choice: group.batch_whitened(choice.baseline),
    "gae": lambda choice: critics.gae(choice.gamma, choice.lambda_),
    "two_level": lambda choice: step.two_level(choice.omega, choice.gamma, choice.std),
    "grouped_gae": lambda choice: step.grouped_gae(choice.gamma, choice.lambda_),
    "prefix_calibrated": lambda choice: tree.prefix_calibrated(),
}
CENTRED = ("group_relative", "leave_one_out")  # a group's advantages have mean 0, one a leaf


def assemble(row: Algorithm, response_tokens: int) -> Assembled:
    """Return the functions that a row names; ``response_tokens`` is the response budget."""
    return Assembled(
        estimator=ESTIMATORS[row.estimator.kind](row.estimator),
        loss=losses.Loss(
            ratio=losses.RATIOS[row.ratio],
            clip=losses.Clip(row.clip.low, row.clip.high, row.clip.dual) if row.clip else None,
            averaging=losses.AVERAGINGS[row.averaging](response_tokens),
            kl=_in_the_loss(row.kl),
            entropy_bonus=row.entropy_bonus,
            importance_cap=row.importance_cap,
        ),
    )


def _in_the_loss(kl: Kl | None) -> losses.Kl | None:
    if kl is None or kl.place != "loss":
        return None
    return losses.Kl(losses.KL_ESTIMATORS[kl.estimator], kl.coefficient)

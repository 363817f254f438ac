"""Rows of params/algorithms.yaml: the independent choices that make up an algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    model_validator,
)

from params.schema.base import PARAMS, Flag, Float, Frozen, Positive, PositiveFloat, Probability
from params.schema.reading import read_table

MOST_BATCHES = 10  # that one iteration rolls out in search of groups with spread (DAPO)


# ---------------------------------------------------------------- rows of algorithms.yaml


def _spelt_out(choice: Any) -> Any:
    """Expand a choice that is written as its kind alone."""
    return {"kind": choice} if isinstance(choice, str) else choice


class Marks(Frozen):
    """Where segments (macro actions of GPG, arXiv 2512.10365, section 4.2) end."""

    kind: Literal["none", "every_token", "tool_call", "paragraph", "think", "entropy", "step"]
    quantile: Annotated[Float, Field(gt=0, lt=1)] | None = None  # of a trajectory's entropies
    threshold: Annotated[Float, Field(ge=0, le=1)] | None = None  # of the entropy over ln|V|

    @model_validator(mode="after")
    def _entropy_is_measured_once(self) -> Marks:
        given = [name for name in ("quantile", "threshold") if getattr(self, name) is not None]
        if len(given) != (self.kind == "entropy"):
            raise ValueError(
                f"{self.kind} marks with {' and '.join(given) or 'neither'}: marks of kind entropy "
                "need either quantile or threshold, the other kinds need none of them"
            )
        return self


class Return(Frozen):
    """The trajectory's reward on every sampled token."""

    kind: Literal["return"]


class GroupRelative(Frozen):
    """(r - mean) / std over the leaves of a question; without ``std`` r - mean."""

    kind: Literal["group_relative"]
    std: Flag = True


class LeaveOneOut(Frozen):
    """r - mean of the other leaves' rewards."""

    kind: Literal["leave_one_out"]


class BatchWhitened(Frozen):
    """Returns whitened over all sampled tokens of the batch; ``baseline``: less the group mean."""

    kind: Literal["batch_whitened"]
    baseline: Flag


class Gae(Frozen):
    """Generalised advantage estimation with a critic, then whitened."""

    kind: Literal["gae"]
    gamma: Probability
    lambda_: Probability = Field(alias="lambda")


class TwoLevel(Frozen):
    """Group-relative over episodes, plus omega times the same over steps from equal states."""

    kind: Literal["two_level"]
    omega: Annotated[Float, Field(ge=0)]
    gamma: Probability
    std: Flag = True


class GroupedGae(Frozen):
    """GAE over environment steps; the value of a state is its mean return in the group."""

    kind: Literal["grouped_gae"]
    gamma: Probability
    lambda_: Probability = Field(alias="lambda")
    normalisation: Literal["group", "batch", "none"] = "group"  # of the steps' advantages
    omega: Annotated[Float, Field(ge=0)] = 0.0  # of an added episode term


class PrefixCalibrated(Frozen):
    """A token's credit: the mean over the trajectories that contain it."""

    kind: Literal["prefix_calibrated"]
    key: Literal["lineage", "token_ids"] = "lineage"  # token_ids also merges equal prefixes


class TreeValue(Frozen):
    """Credit of what lies between two branching points: the value after it less that before it."""

    kind: Literal["tree_value"]
    leave_one_out: Flag = False  # the value before it is the mean over the other paths alone


Estimator = Annotated[
    Return
    | GroupRelative
    | LeaveOneOut
    | BatchWhitened
    | Gae
    | TwoLevel
    | GroupedGae
    | PrefixCalibrated
    | TreeValue,
    Field(discriminator="kind"),
    BeforeValidator(_spelt_out),
]


class ClipRange(Frozen):
    """Clip the ratio to [1 - low, 1 + high], and losses where A < 0 to -dual * A."""

    low: PositiveFloat
    high: PositiveFloat
    dual: Annotated[Float, Field(gt=1)] | None = None


class Kl(Frozen):
    """A penalty on the distance from a reference: the cold start, or a policy of the run."""

    place: Literal["loss", "reward"]
    estimator: Literal["k1", "k2", "k3"]
    coefficient: PositiveFloat
    refresh: Positive | None = None  # iterations between references; null: the cold start

    @model_validator(mode="after")
    def _has_a_gradient(self) -> Kl:
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError(
                "k1 in the loss has an on-policy gradient of mean zero: take k2 or k3, or place it "
                "in the reward"
            )
        if self.place == "reward" and self.estimator != "k1":
            raise ValueError(f"{self.estimator} in the reward: only k1 is defined there")
        return self


class Overlong(Frozen):
    """DAPO's soft penalty (arXiv 2503.14476, equation 13) on responses near the token budget."""

    buffer: Annotated[Float, Field(gt=0, le=1)]  # share of the budget in which the penalty rises
    factor: PositiveFloat  # the penalty at the end of the budget


class Critic(Frozen):
    """A value head for GAE, on the policy's backbone or on its own, which starts as a copy."""

    backbone: Literal["own", "shared"]
    value_clip: PositiveFloat | None  # how far a value may move from the old one; null: any
    coefficient: PositiveFloat  # of the value loss


Maskable = Literal[
    "world_failed",
    "world_timeout",
    "replay_differs",
    "unavailable",
    "tools_changed",
    "over_budget",
    "cut",
    "out_of_space",
    "too_many_calls",
    "truncated",
]
# failures of the infrastructure (tasks/trees/outcomes.py), which no agent brings about
INFRASTRUCTURE: tuple[Maskable, ...] = (
    "replay_differs",
    "world_failed",
    "world_timeout",
    "unavailable",
    "tools_changed",
    "over_budget",
)


class Algorithm(Frozen):
    """The choices of one algorithm: a row of params/algorithms.yaml."""

    branching: Literal["none", "marks", "entropy"]
    marks: Annotated[Marks, BeforeValidator(_spelt_out)]
    estimator: Estimator
    ratio: Literal["none", "token", "segment", "sequence"]
    clip: ClipRange | None
    averaging: Literal["token_mean", "sequence_mean", "unit_mean", "constant_length"]
    group_filter: Literal["none", "spread"] = "none"
    overlong: Overlong | None = None
    kl: Kl | None = None
    critic: Critic | None = None
    entropy_bonus: Annotated[Float, Field(ge=0)] = 0.0
    importance_cap: PositiveFloat | None = 2.0  # of old policy over sampler; null: no weights
    masked: tuple[Maskable, ...] = INFRASTRUCTURE  # outcomes whose leaves are not learned from
    # what has weight 1 in the loss; paths: branches share the weight of the path they continue
    counts: Literal["leaves", "paths"] = "leaves"

    @model_validator(mode="after")
    def _can_be_done(self) -> Algorithm:
        faults = [reason for impossible, reason in self._impossible() if impossible]
        if faults:
            raise ValueError("; ".join(faults))
        return self

    def kl_in(self, place: str) -> bool:
        """Return whether there is a KL term in "loss" or "reward"."""
        return self.kl is not None and self.kl.place == place

    def _impossible(self) -> list[tuple[bool, str]]:
        """Return (whether it applies, message with remedy) of every impossible combination."""
        estimator, marks = self.estimator.kind, self.marks.kind
        has_critic, needs_critic = self.critic is not None, estimator == "gae"
        return [
            (
                has_critic and not needs_critic,
                f"critic is given, and the estimator {estimator} uses none: set critic to null, or "
                "the estimator to gae",
            ),
            (needs_critic and not has_critic, "the estimator gae needs the section critic"),
            (
                self.branching == "marks" and marks == "none",
                "branching at marks needs marks: choose a kind other than none",
            ),
            (
                self.branching == "entropy" and marks != "tool_call",
                f"branching by entropy is judged after tool results, and marks is {marks}: set it "
                "to tool_call",
            ),
            (
                (self.ratio == "none") != (self.clip is None),
                f"ratio is {self.ratio} and clip is {'null' if self.clip is None else 'given'}: a "
                "ratio needs its clip range, and without one there is nothing to clip",
            ),
            (
                self.ratio == "segment" and marks == "none",
                "a ratio of segments needs marks: choose a kind, or the ratio sequence",
            ),
            (
                self.averaging == "unit_mean" and self.ratio not in ("segment", "sequence"),
                f"unit_mean averages over the units of the ratio, which is {self.ratio}: set it to "
                "segment or sequence, or average by token_mean",
            ),
            (
                estimator in ("two_level", "grouped_gae") and marks != "step",
                f"the estimator {estimator} credits environment steps, and marks is {marks}: set "
                "it to step",
            ),
        ]


def load_algorithms(folder: Path = PARAMS) -> dict[str, Algorithm]:
    """Read the rows of ``<folder>/algorithms.yaml`` by name.

    Raises ValueError with file, row and reason for a row that does not parse.
    """
    return read_table(folder / "algorithms.yaml", Algorithm)

"""Rows of params/algorithms.yaml: the independent choices that make up an algorithm."""

from __future__ import annotations

from collections.abc import Mapping
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


class NoEstimator(Frozen):
    """No advantage from rewards; a teacher gives them all."""

    kind: Literal["none"]


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


class MeanRelative(Frozen):
    """(r - mean) / mean over the leaves of a question; needs rewards that are not negative."""

    kind: Literal["mean_relative"]


class PartRelative(Frozen):
    """Each part of the reward by itself (r - mean) / std; their sum, whitened over the batch."""

    kind: Literal["part_relative"]
    weights: Mapping[str, PositiveFloat] = Field(default_factory=dict)  # part -> weight; others: 1


class BatchWhitened(Frozen):
    """Returns whitened over all sampled tokens of the batch; ``baseline``: less the group mean."""

    kind: Literal["batch_whitened"]
    baseline: Flag


class Gae(Frozen):
    """Generalised advantage estimation with a critic, then whitened."""

    kind: Literal["gae"]
    gamma: Probability
    lambda_: Probability = Field(alias="lambda")


# What makes two states of a group equal: what the step acted on, or all that it has seen.
StateKey = Literal["observation", "history"]


class TwoLevel(Frozen):
    """Group-relative over episodes, plus omega times the same over steps from equal states."""

    kind: Literal["two_level"]
    omega: Annotated[Float, Field(ge=0)]
    gamma: Probability
    std: Flag = True
    key: StateKey = "observation"


class GroupedGae(Frozen):
    """GAE over environment steps; the value of a state is its mean return in the group."""

    kind: Literal["grouped_gae"]
    gamma: Probability
    lambda_: Probability = Field(alias="lambda")
    normalisation: Literal["group", "batch", "none"] = "group"  # of the steps' advantages
    omega: Annotated[Float, Field(ge=0)] = 0.0  # of an added episode term
    key: StateKey = "observation"


class PrefixCalibrated(Frozen):
    """A token's credit: the mean over the trajectories that contain it."""

    kind: Literal["prefix_calibrated"]
    key: Literal["lineage", "token_ids"] = "lineage"  # token_ids also merges equal prefixes


class RolloutRelative(Frozen):
    """(r - mean) / std over the question, plus the same over the leaves of an initial rollout."""

    kind: Literal["rollout_relative"]


class TreeValue(Frozen):
    """Credit of what lies between two branching points: the value after it less that before it."""

    kind: Literal["tree_value"]
    leave_one_out: Flag = False  # the value before it is the mean over the other paths alone


Estimator = Annotated[
    NoEstimator
    | Return
    | GroupRelative
    | LeaveOneOut
    | MeanRelative
    | PartRelative
    | BatchWhitened
    | Gae
    | TwoLevel
    | GroupedGae
    | PrefixCalibrated
    | RolloutRelative
    | TreeValue,
    Field(discriminator="kind"),
    BeforeValidator(_spelt_out),
]


class ClipRange(Frozen):
    """Clip the ratio to [1 - low, 1 + high], and losses where A < 0 to -dual * A."""

    low: PositiveFloat | None  # null: no lower end, for objectives that weight log pi
    high: PositiveFloat
    dual: Annotated[Float, Field(gt=1)] | None = None


class _Objective(Frozen):
    """What a token adds to the loss, from its ratio and its advantage."""

    kind: str

    def settings(self) -> dict[str, float]:
        """Return what the objective's function takes beside its kind."""
        return {name: value for name, value in self.model_dump().items() if name != "kind"}


class Clipped(_Objective):
    """-min(rho A, clip(rho) A): PPO (arXiv 1707.06347)."""

    kind: Literal["clipped"]


class Cispo(_Objective):
    """-sg(clip(rho)) A log pi: MiniMax-M1 (arXiv 2506.13585)."""

    kind: Literal["cispo"]


class Sapo(_Objective):
    """-(4 / tau) sigmoid(tau (rho - 1)) A: arXiv 2511.20347."""

    kind: Literal["sapo"]
    positive: PositiveFloat = 1.0  # tau where A > 0
    negative: PositiveFloat = 1.05  # tau where not


class Trust(Frozen):
    """How far the probability of a token may be from the sampler's."""

    low: Annotated[Float, Field(gt=0, le=1)]  # below it, where A < 0
    high: Annotated[Float, Field(gt=0, le=1)]  # above it, where A > 0


class Dppo(_Objective):
    """-sg(clip(rho)) A log pi where the token's probability is in a trust region, else 0.

    arXiv 2602.04879, with the total variation.
    """

    kind: Literal["dppo"]
    trust: Trust

    def settings(self) -> dict[str, float]:
        return {"low": self.trust.low, "high": self.trust.high}


Objective = Annotated[
    Clipped | Cispo | Sapo | Dppo, Field(discriminator="kind"), BeforeValidator(_spelt_out)
]


class ImportanceMask(Frozen):
    """Leave out tokens or leaves whose w = pi_old / pi_sampler is not within bounds.

    token: w of the token. sequence: the product of w over the leaf. geometric: exp of the mean of
    log w over the leaf. k3: the mean of w - log w - 1 over the leaf, which has no lower bound.
    """

    kind: Literal["token", "sequence", "geometric", "k3"]
    low: Annotated[Float, Field(ge=0)] = 0.0
    high: PositiveFloat

    @model_validator(mode="after")
    def _keeps_what_agrees(self) -> ImportanceMask:
        if self.kind == "k3" and self.low:
            raise ValueError(
                f"low is {self.low}, and k3 is 0 where sampler and trainer agree: leave low out"
            )
        if self.kind != "k3" and not self.low <= 1 <= self.high:
            raise ValueError(
                f"low is {self.low} and high {self.high}, which leaves out even what sampler and "
                "trainer agree on, where w is 1: set low to at most 1 and high to at least 1"
            )
        return self


class ImportanceChoice(Frozen):
    """Weights and masks of the policy term by w = pi_old / pi_sampler."""

    weight: Literal["token", "sequence", "none"] = "token"  # sequence: the product over the leaf
    # of the weight; one below 1 would scale the loss where sampler and trainer agree
    cap: Annotated[PositiveFloat, Field(ge=1)] = 2.0
    mask: ImportanceMask | None = None
    # DeepSeek-V3.2's mask: tokens with A < 0 of leaves from which the policy that learns has moved
    # away by more than this, in nats a token
    negative: PositiveFloat | None = None


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


class Teaching(Frozen):
    """On-policy distillation: log teacher - log policy of each sampled token, as its advantage.

    It is added to the estimator's. The recipe's section ``teacher`` names the policy that teaches.
    """

    weight: PositiveFloat


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
    "program_died",
    "program_failed",
    "program_timeout",
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
    "program_died",
)


class Algorithm(Frozen):
    """The choices of one algorithm: a row of params/algorithms.yaml."""

    branching: Literal["none", "marks", "entropy", "random"]
    marks: Annotated[Marks, BeforeValidator(_spelt_out)]
    estimator: Estimator
    ratio: Literal["none", "token", "segment", "sequence"]
    clip: ClipRange | None
    averaging: Literal["token_mean", "sequence_mean", "unit_mean", "constant_length"]
    group_filter: Literal["none", "spread"] = "none"
    surplus: Literal["wasted", "next"] = "wasted"  # what becomes of groups that it did not need
    overlong: Overlong | None = None
    kl: Kl | None = None
    critic: Critic | None = None
    teacher: Teaching | None = None
    entropy_bonus: Annotated[Float, Field(ge=0)] = 0.0
    importance: ImportanceChoice = ImportanceChoice()  # of old policy over sampler
    objective: Objective = Clipped(kind="clipped")
    against: Literal["old", "sampler"] = "old"  # whose log-probabilities the ratio divides by
    masked: tuple[Maskable, ...] = INFRASTRUCTURE  # outcomes whose leaves are not learned from
    # what has weight 1 in the loss; paths: branches share the weight of the path they continue
    counts: Literal["leaves", "paths"] = "leaves"

    @model_validator(mode="before")
    @classmethod
    def _has_one_cap(cls, row: Any) -> Any:
        """Take ``importance_cap``, which the section importance was before."""
        if not isinstance(row, dict) or "importance_cap" not in row:
            return row
        row = dict(row)
        cap = row.pop("importance_cap")
        if "importance" in row:
            raise ValueError("importance_cap is what importance.cap was before: leave it out")
        given = {"weight": "none"} if cap is None else {"cap": cap}
        return {**row, "importance": given}

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
        return [*self._impossible_credit(), *self._impossible_loss()]

    def _impossible_credit(self) -> list[tuple[bool, str]]:
        """Return those of branching, marks, estimator and what it needs."""
        estimator, marks = self.estimator.kind, self.marks.kind
        has_critic, needs_critic = self.critic is not None, estimator == "gae"
        return [
            (
                has_critic and not needs_critic,
                f"critic is given, and the estimator {estimator} uses none: set critic to null, or "
                "the estimator to gae",
            ),
            (
                estimator == "none" and self.teacher is None,
                "the estimator none gives no advantage, and teacher is null: nothing is learned; "
                "choose an estimator, or write the section teacher",
            ),
            (
                self.surplus == "next" and self.group_filter == "none",
                "surplus is next, and without a group_filter no group is left over: set it to "
                "wasted, or group_filter to spread",
            ),
            (
                self.surplus == "next" and self.ratio == "none",
                "surplus is next, so an earlier policy's groups are learned from, and ratio is "
                "none, which corrects nothing: set surplus to wasted, or choose a ratio",
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
                estimator in ("mean_relative", "part_relative") and self.kl_in("reward"),
                f"the estimator {estimator} compares rewards of leaves, and kl is in the reward, "
                "token by token: place it in the loss",
            ),
            (
                estimator == "mean_relative" and self.overlong is not None,
                "the estimator mean_relative divides by the mean reward, and overlong gives "
                "rewards below 0: leave overlong out, or take the estimator group_relative",
            ),
            (
                estimator == "rollout_relative" and self.branching == "none",
                "the estimator rollout_relative compares leaves of one initial rollout, and "
                "nothing branches: set branching to random, marks or entropy",
            ),
            (
                estimator in ("two_level", "grouped_gae") and marks != "step",
                f"the estimator {estimator} credits environment steps, and marks is {marks}: set "
                "it to step",
            ),
        ]

    def _impossible_loss(self) -> list[tuple[bool, str]]:
        """Return those of ratio, objective, clip range, weights and averaging."""
        objective, marks = self.objective.kind, self.marks.kind
        return [
            (
                objective != "sapo" and (self.ratio == "none") != (self.clip is None),
                f"ratio is {self.ratio} and clip is {'null' if self.clip is None else 'given'}: a "
                "ratio needs its clip range, and without one there is nothing to clip",
            ),
            (
                objective == "sapo" and self.clip is not None,
                "the objective sapo has no clip range, and clip is given: set clip to null",
            ),
            (
                objective != "clipped" and self.ratio == "none",
                f"the objective {objective} bounds a ratio, and ratio is none: set it to token, or "
                "the objective to clipped",
            ),
            (
                objective == "dppo" and self.ratio not in ("none", "token"),
                f"the objective dppo looks at single tokens, and ratio is {self.ratio}: set it to "
                "token",
            ),
            (
                self.clip is not None and self.clip.low is None and objective == "clipped",
                "clip.low is null, and the objective clipped needs both ends: give clip.low, or "
                "take the objective cispo",
            ),
            (
                self.clip is not None and self.clip.dual is not None and objective != "clipped",
                f"clip.dual belongs to the objective clipped, and this is {objective}: leave it "
                "out",
            ),
            (
                self.against == "sampler" and self.ratio == "none",
                "against is sampler, and ratio is none: there is nothing to divide; leave it out",
            ),
            (
                self.against == "sampler" and self.importance.weight != "none",
                "the ratio is against the sampler, which a weight by importance would count twice: "
                "set importance.weight to none",
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
        ]


def load_algorithms(folder: Path = PARAMS) -> dict[str, Algorithm]:
    """Read the rows of ``<folder>/algorithms.yaml`` by name.

    Raises ValueError with file, row and reason for a row that does not parse.
    """
    return read_table(folder / "algorithms.yaml", Algorithm)

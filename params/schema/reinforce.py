"""The sections ``reinforce`` and ``lora``."""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    Field,
    model_validator,
)

from params.schema.base import Decay, Frozen, NonNegative, Positive, PositiveFloat


class Lora(Frozen):
    """Low-rank adapters instead of all weights (arXiv 2106.09685), through peft."""

    rank: Positive
    alpha: PositiveFloat  # the adapters' product is scaled by alpha / rank
    modules: Annotated[tuple[str, ...], Field(min_length=1)]  # names of linear layers


class Rollout(Frozen):
    """Budgets of one question's tree (ARPO section 3.1)."""

    leaves: Positive  # M, total budget a question
    initial: Positive  # N, rollouts from the prompt
    branch: NonNegative  # Z, extra paths a branching (GPG: N continuations of a mark)
    marks_per_rollout: Positive  # GPG: marks of each of the initial rollouts that branch
    entropy_window: Positive  # k, tokens
    base_probability: float  # alpha
    entropy_weight: float  # beta
    threshold: float  # tau
    draw: bool  # branch with probability P instead of iff P > tau
    temperature: PositiveFloat
    rows: Positive  # paths that are sampled side by side, at most

    @model_validator(mode="after")
    def _budget_covers_start(self) -> Rollout:
        if self.initial > self.leaves:
            raise ValueError(
                f"initial {self.initial} exceeds leaves {self.leaves}: the total budget must cover "
                "the rollouts that it starts with; lower initial or raise leaves"
            )
        if self.rows < self.leaves:
            raise ValueError(
                f"rows {self.rows} cannot hold the {self.leaves} leaves of one question: raise "
                "rows, or lower leaves"
            )
        return self


class Reward(Frozen):
    broken_format: float
    wrong: float
    many_tools_bonus: float

    def range(self) -> tuple[float, float]:
        """The lowest and the highest reward that can be given; a graded score may be near 0."""
        values = (self.broken_format, self.wrong, 0.0, 1.0, 1.0 + self.many_tools_bonus)
        return min(values), max(values)


class Update(Frozen):
    learning_rate: PositiveFloat
    warmup_updates: NonNegative
    weight_decay: Annotated[float, Field(ge=0)]
    adam_betas: tuple[Decay, Decay]
    gradient_clip: PositiveFloat  # global norm
    epochs: Positive  # passes over one batch of trees
    mini_batches: Positive  # optimizer steps a pass
    micro_batch_tokens: Positive  # tokens of a forward pass, at most; each of a tree once
    critic_learning_rate: PositiveFloat  # of a critic's own weights, where the algorithm has one
    recompute: bool  # activations in the backward pass instead of keeping them: memory for time


class Keep(Frozen):
    """What the ledger keeps of an iteration's update; trees, rewards and advantages always stay."""

    weights_every: Positive  # the weights of every so many iterations stay for ever
    optimizer_last: Positive  # newest iterations whose weights and optimizer state stay


class Reinforce(Frozen):
    algorithm: str  # a row of params/algorithms.yaml
    iterations: Positive
    questions: Positive  # an iteration
    rollout: Rollout
    reward: Reward
    update: Update
    ahead: Annotated[int, Field(ge=0, le=1)]  # updates that the policy that samples may lack
    keep: Keep
    trace_every: Positive  # iterations between those of which trajectories go to MLflow
    trace_questions: NonNegative  # of such an iteration, whose trajectories go there

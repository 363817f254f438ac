"""The sections ``reinforce`` and ``lora``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, model_serializer, model_validator

from params.schema.base import Flag, Float, Frozen, Integer, NonNegative, Positive, PositiveFloat

Decay = Annotated[Float, Field(ge=0, lt=1)]
AlarmName = Literal[
    "entropy_collapse",
    "entropy_rise",
    "no_spread",
    "success_lost",
    "reward_lost",
    "validation_lost",
    "reward_hacked",
    "model_hacked",
    "tools_unused",
    "history_changed",
    "gradient_spike",
    "mismatch_spike",
    "masked",
    "world_broken",
]


class Lora(Frozen):
    """The section ``lora``: train low-rank adapters (arXiv 2106.09685) instead of all weights."""

    rank: Positive
    alpha: PositiveFloat  # the product of the two adapter matrices is scaled by alpha / rank
    modules: Annotated[tuple[str, ...], Field(min_length=1)]  # names of linear layers


class Rollout(Frozen):
    """The budget of one question's tree (letters: ARPO, section 3.1)."""

    leaves: Positive  # M, total number of paths per question
    initial: Positive  # N, how many of them start from the prompt
    branch: NonNegative  # Z, extra paths per branching (GPG: continuations of a mark)
    marks_per_rollout: Positive  # GPG: how many marks of each initial rollout branch
    entropy_window: Positive  # k, tokens after a tool result
    base_probability: Float  # alpha
    entropy_weight: Float  # beta
    threshold: Float  # tau
    draw: Flag  # true: branch with probability P; false: branch if P > tau
    temperature: PositiveFloat
    rows: Positive  # most paths that are sampled in parallel

    @model_validator(mode="after")
    def _budget_covers_start(self) -> Rollout:
        if self.initial > self.leaves:
            raise ValueError(
                f"initial {self.initial} exceeds leaves {self.leaves}, and initial rollouts are "
                "leaves too: lower initial, or raise leaves"
            )
        if self.rows < self.leaves:
            raise ValueError(
                f"rows {self.rows} cannot hold the {self.leaves} leaves of one question: raise "
                "rows, or lower leaves"
            )
        return self


class RewardPart(Frozen):
    """An entry of the list ``reward``: a part of the reward by name, and its settings."""

    name: str  # of a file in tasks/rewards, or a user's function: own/brevity.py:brevity
    settings: SerializeAsAny[Frozen]  # tasks/rewards/reward_parts.py has their types

    @model_serializer
    def _as_in_a_recipe(self) -> dict[str, Any]:
        return {self.name: self.settings.model_dump()}


class Update(Frozen):
    """How an update learns from a batch of trees (AdamW)."""

    learning_rate: PositiveFloat
    warmup_updates: NonNegative  # updates in which the learning rate rises
    weight_decay: Annotated[Float, Field(ge=0)]
    adam_betas: tuple[Decay, Decay]
    gradient_clip: PositiveFloat  # global norm
    epochs: Positive  # passes over one batch of trees
    mini_batches: Positive  # optimizer steps per pass
    micro_batch_tokens: Positive  # most tokens per forward pass; a shared token counts once
    critic_learning_rate: PositiveFloat  # for a critic's own weights, if the algorithm has one
    # recompute activations in the backward pass: less memory, more time
    recompute: Flag = False
    # KL of the learning policy from the one that sampled, beyond which a batch gets no more steps
    stop_at_kl: PositiveFloat | None = None


class Keep(Frozen):
    """Which updates keep their weights in the ledger; trees, rewards and advantages always stay."""

    weights_every: Positive  # iterations between those whose weights stay for good
    optimizer_last: Positive  # newest iterations that keep weights and optimizer state


class Validation(Frozen):
    """Which policies are asked the validation questions, and which one the stage publishes.

    Temperature and top_p are those of the section ``evaluate``, the measure that of ``verdict``.
    """

    every: Positive  # iterations between those whose policy is asked; the first and last are, too
    questions: Positive  # most tasks of the panel of the validation split
    samples: Positive = 1  # answers a question
    # models/<recipe>/trained: the last policy, or the best one of those that were asked
    publish: Literal["last", "best"] = "last"


class Curriculum(Frozen):
    """Questions whose groups had no spread come back later."""

    rest: Positive  # passes over the questions that such a question is left out of


class Reinforce(Frozen):
    """Reinforcement learning: the algorithm, its budgets, and what is kept and traced."""

    algorithm: str  # a row of params/algorithms.yaml
    iterations: Positive
    questions: Positive  # per iteration
    rollout: Rollout
    reward: tuple[RewardPart, ...]  # parts, which are added up; tasks/recipes reads them
    update: Update
    ahead: Annotated[Integer, Field(ge=0, le=8)] = 0  # batches that are sampled before their turn
    # Most turns of a path that a policy samples of a batch before the next policy goes on with it;
    # null: one policy samples a whole batch.
    turns_per_policy: Positive | None = None
    curriculum: Curriculum | None = None  # null: each pass asks all questions
    keep: Keep
    trace_every: Positive  # iterations between those whose trajectories are logged to MLflow
    trace_questions: NonNegative  # how many questions of such an iteration are logged
    stop_on: tuple[AlarmName, ...] = ()  # alarms that end the run; the others are only reported
    validation: Validation | None = None  # null: the validation questions are not asked

    @property
    def samplers(self) -> int:
        """Return how many policies sample a batch, at most."""
        return 1 if self.turns_per_policy is None else self.ahead

    @model_validator(mode="after")
    def _several_policies_sample(self) -> Reinforce:
        if self.turns_per_policy is not None and self.ahead < 2:
            raise ValueError(
                f"turns_per_policy is {self.turns_per_policy} and ahead is {self.ahead}, so a "
                "single policy samples a batch: set ahead to 2 or more, or turns_per_policy to null"
            )
        if self.turns_per_policy is not None and self.curriculum is not None:
            raise ValueError(
                "curriculum chooses questions by the groups of all batches before, of which "
                f"turns_per_policy {self.turns_per_policy} leaves some unfinished: set "
                "turns_per_policy or curriculum to null"
            )
        return self

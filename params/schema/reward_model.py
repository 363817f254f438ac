"""The section ``reward_model``: a model that learns which trajectories succeed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from params.schema.base import Float, Frozen, NonNegative, Positive, PositiveFloat

Share = Annotated[Float, Field(gt=0, le=1)]


class Again(Frozen):
    """How the model is trained again in reinforcement learning, from a replay buffer.

    The buffer has the trees of the newest iterations whose questions have labels, beside those of
    the first training.
    """

    every: Positive  # iterations between two trainings; in between, the model does not change
    frozen: NonNegative  # first iterations, in which it does not change
    steps: Positive  # optimizer steps of a training
    iterations: Positive  # newest iterations in the buffer
    mebibytes: Positive  # of all trees of these iterations on the disk, at most; the oldest go

    def due(self, iteration: int) -> bool:
        """Return whether the model is trained at the end of an iteration, from 0."""
        return iteration >= self.frozen and (iteration + 1) % self.every == 0


LEAST_LABELLED = 8  # questions with labels in a mean batch, where success is theirs alone


class RewardModel(Frozen):
    """Which trajectories have labels, and how the model learns from them (AdamW)."""

    labels: Share  # of the training questions: a rule or a judge scores their trajectories
    scored: Literal["all", "labelled"]  # questions that are scored in reinforcement learning
    held_out: Annotated[Float, Field(gt=0, lt=1)]  # share of these that calibrate and judge it
    questions: Positive  # with labels, which the cold start answers for the first training, at most
    loss: Literal["classification", "pairs"]
    steps: Positive  # optimizer steps of the first training
    batch: Annotated[Positive, Field(multiple_of=2)]  # trajectories a step: half of them succeeded
    micro_batch_tokens: Positive  # most tokens of a forward pass; a shared token counts once
    learning_rate: PositiveFloat
    warmup_steps: NonNegative  # in which the learning rate rises
    weight_decay: Annotated[Float, Field(ge=0)]
    gradient_clip: PositiveFloat  # global norm
    save_every: Positive  # steps between checkpoints, from which a killed training goes on
    again: Again | None = None  # null: it does not change after the first training

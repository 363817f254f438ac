"""A reward model that learns on while the policy trains."""

from __future__ import annotations

from tasks import recipes
from tasks.learning import replay
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.reward_model import RewardModelInputs, reward_model
from tasks.training.agents import Agents
from tasks.training.sampling import ScoredBatch
from tasks.training.setup import Training


class LearnedReward:
    """The replay buffer, and the training of the reward model at the end of iterations."""

    def __init__(self, training: Training) -> None:
        self.training = training
        published = training.reward_model
        self.buffer = replay.Buffer(
            (replay.ScoredTrees(published.trees, published.rewards),) if published else ()
        )
        self.models: list[Artifact] = []  # with which the batches of the iterations were scored

    def learn(self, step: SubStep, agents: Agents, scored: ScoredBatch) -> Record | None:
        """Add an iteration to the buffer; return the record of a training, if one is due.

        The next batch that is begun is scored by the new model, and those that were begun before by
        the one that they began with.
        """
        recipe = self.training.recipe
        section, model = recipe.reward_model, agents.reward_model
        if section is None or section.again is None or model is None:
            return None
        self.buffer = self.buffer.add(scored.scored_trees, section.again)
        self.models.append(model)
        if not section.again.due(step.iteration):
            return None
        inputs = RewardModelInputs(
            policy=self.training.policy,
            before=model,
            trees=[batch.trees for batch in self.buffer.batches],
            rewards=[batch.rewards for batch in self.buffer.batches],
            first_batches=len(self.buffer.first_batches),
            labels=recipes.labels_of(recipe),
            settings=section,
            steps=section.again.steps,
            machine=recipe.machine,
        )
        record = reward_model(step, inputs)
        every, waiting = recipe.reinforce.keep.weights_every, recipe.reinforce.ahead
        step.ledger.retire(step, "reward_model", 1, every, ["model"], self.models[-1 - waiting :])
        return record

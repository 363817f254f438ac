"""What an iteration begins with, and what the next one gets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from params.schema.algorithms import Algorithm
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.training.iteration import Iteration, policy_of
from tasks.training.setup import Training


@dataclass(frozen=True)
class Agents:
    """What an iteration begins with: policy, optimizer, critic, the reference of a KL term, and the
    reward model.
    """

    policy: Artifact
    steps: int  # optimizer steps that the policy has taken
    optimizer: Artifact | None
    critic: Artifact | None
    reference: Artifact
    reward_model: Artifact | None = None

    @staticmethod
    def first(training: Training) -> Agents:
        """Return what a training begins with."""
        policy, published = training.policy, training.reward_model
        return Agents(policy, 0, None, None, policy, published.model if published else None)

    def at(self, iteration: int, algorithm: Algorithm) -> Agents:
        """Return the agents with the reference that holds from this iteration on."""
        kl = algorithm.kl
        refreshed = kl and kl.refresh and iteration % kl.refresh == 0
        return replace(self, reference=self.policy) if refreshed else self

    def after(self, iteration: Iteration, algorithm: Algorithm) -> Agents:
        """Return what the next iteration begins with."""
        (updated,) = iteration["update"]
        records = iteration.get("reward_model")
        return Agents(
            policy=policy_of(iteration),
            steps=self.steps + int(updated["metrics"]["optimizer_steps"]),
            optimizer=artifacts.output(updated, "optimizer"),
            critic=artifacts.output(updated, "critic") if algorithm.critic else None,
            reference=self.reference,
            reward_model=artifacts.output(records[0], "model") if records else self.reward_model,
        )

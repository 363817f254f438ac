"""What each verb of an iteration is made from: the recipe's sections and earlier artifacts.

These are the cache keys of the ledger, so each field is named here once.
"""

from __future__ import annotations

from collections.abc import Sequence

from params.schema.algorithms import Marks
from tasks import recipes
from tasks.advantage import AdvantageInputs
from tasks.collect import CURVE, TABLES, CollectInputs
from tasks.estimate import EstimateInputs
from tasks.learning.batch import UpdateInputs
from tasks.learning.replay import ScoredTrees
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact, Record
from tasks.reward import RewardInputs
from tasks.rollout import RolloutInputs, told_of
from tasks.training.agents import Agents
from tasks.training.iteration import Iteration
from tasks.training.setup import Training


def rollout_inputs(
    training: Training, agents: Agents, consumed: int, attempt: int
) -> RolloutInputs:
    """Return what a batch of rollouts is made from.

    ``consumed``: questions that earlier iterations have taken. ``attempt``: batches of this
    iteration before this one.
    """
    recipe, algorithm = training.recipe, training.algorithm
    return RolloutInputs(
        policy=agents.policy,
        policy_steps=agents.steps,
        questions=training.questions,
        size=recipe.reinforce.questions,
        first=consumed,
        attempt=attempt,
        branching=algorithm.branching,
        marks=algorithm.marks if algorithm.branching == "marks" else Marks(kind="none"),
        budget=recipe.reinforce.rollout,
        agent=recipes.agent_of(recipe),
        corpus=training.corpus,
        told=told_of(training.environment),
    )


def estimate_inputs(training: Training, model: Artifact, rolled_out: Record) -> EstimateInputs:
    """Return what the reward model's estimates of a batch are made from."""
    section = training.recipe.reward_model
    assert section, "a reward model has its section"
    return EstimateInputs(
        model=model,
        trees=artifacts.output(rolled_out, "trees"),
        micro_batch_tokens=section.micro_batch_tokens,
        machine=training.recipe.machine,
    )


def reward_inputs(
    training: Training, rolled_out: Record, estimated: Record | None = None
) -> RewardInputs:
    """Return what the rewards of a batch are made from; ``estimated``: by the reward model."""
    return RewardInputs(
        trees=artifacts.output(rolled_out, "trees"),
        settings=training.recipe.reinforce.reward,
        overlong=training.algorithm.overlong,
        response_tokens=training.recipe.dialogue.response_tokens,
        dialect=training.recipe.dialect,
        tools=tuple(spec.name for spec in training.environment.specs),
        estimates=artifacts.output(estimated, "estimates") if estimated else None,
        masked=training.algorithm.masked,
        **training.judged,
    )


def advantage_inputs(
    training: Training,
    agents: Agents,
    samplers: dict[int, Artifact],
    batches: Sequence[ScoredTrees],
) -> AdvantageInputs:
    """Return what an iteration's advantages are made from.

    ``samplers``: the policies that sampled the batches, by the optimizer steps of each.
    """
    recipe, algorithm = training.recipe, training.algorithm
    return AdvantageInputs(
        policy=agents.policy,
        samplers=samplers,
        critic=agents.critic,
        reference=agents.reference if algorithm.kl_in("reward") else None,
        trees=[batch.trees for batch in batches],
        rewards=[batch.rewards for batch in batches],
        parts=_parts(batches) if algorithm.estimator.kind == "part_relative" else None,
        algorithm=algorithm,
        questions=recipe.reinforce.questions,
        settings=recipe.reinforce.update,
        temperature=recipe.reinforce.rollout.temperature,
        response_tokens=recipe.dialogue.response_tokens,
        machine=recipe.machine,
        step_weight=recipes.step_weight(recipe),
        teacher=training.teacher if algorithm.teacher else None,
    )


def _parts(batches: Sequence[ScoredTrees]) -> list[Artifact]:
    return [batch.parts for batch in batches if batch.parts]


def update_inputs(
    training: Training,
    agents: Agents,
    samplers: dict[int, Artifact],
    batches: Sequence[ScoredTrees],
    credited: Record,
) -> UpdateInputs:
    """Return what an iteration's update is made from; ``credited``: the advantages' record."""
    recipe, algorithm = training.recipe, training.algorithm
    return UpdateInputs(
        policy=agents.policy,
        policy_steps=agents.steps,
        samplers=samplers,
        optimizer=agents.optimizer,
        critic=agents.critic,
        reference=agents.reference if algorithm.kl_in("loss") else None,
        trees=[batch.trees for batch in batches],
        advantages=artifacts.output(credited, "advantages"),
        algorithm=algorithm,
        settings=recipe.reinforce.update,
        temperature=recipe.reinforce.rollout.temperature,
        response_tokens=recipe.dialogue.response_tokens,
        machine=recipe.machine,
        lora=recipe.lora,
    )


def collect_inputs(training: Training, iterations: Sequence[Iteration]) -> CollectInputs:
    """Return what the checks of a whole training are made from."""
    recipe = training.recipe
    exams = [record for one in iterations for record in one.get("validation", ())]
    return CollectInputs(
        leaves=recipe.reinforce.rollout.leaves,
        reward=recipe.reinforce.reward,
        algorithm=training.algorithm,
        dialogue=recipe.dialogue,
        tables=[tables_of(iteration) for iteration in iterations],
        metrics=[
            {verb: [record["metrics"] for record in iteration[verb]] for verb in CURVE}
            for iteration in iterations
        ],
        validation={
            record["step"]["iteration"]: artifacts.output(record, "rewards")
            for record in exams
            if record["verb"] == "reward"
        },
    )


def tables_of(iteration: Iteration) -> dict[str, list[Artifact]]:
    """Return the tables that an iteration has made, by name; [] for those that it has not."""
    return {
        name: [
            artifacts.output(record, name)
            for verb in verbs
            for record in iteration.get(verb, ())
            if name in record["artifacts"]
        ]
        for name, verbs in TABLES.items()
    }

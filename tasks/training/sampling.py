"""Sample one iteration's batch and score it: rollout, estimate, reward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from params.schema.algorithms import MOST_BATCHES
from params.schema.base import Machine
from tasks.carry import CarryInputs, carry
from tasks.estimate import estimate
from tasks.evaluation.exam import judges_of
from tasks.learning.replay import ScoredTrees
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.policy import resident
from tasks.policy.resident import Learner
from tasks.reward import reward
from tasks.rollout import rollout, rollout_part
from tasks.training.agents import Agents
from tasks.training.curriculum import Chosen, choose, due_after
from tasks.training.inputs import estimate_inputs, reward_inputs, rollout_inputs
from tasks.training.setup import Training
from tasks.trees.tables import question_ids


@dataclass(frozen=True)
class ScoredBatch:
    """An iteration's rollouts and their rewards, a record a batch, and who sampled them."""

    samplers: Mapping[int, Artifact]  # by the optimizer steps that each had taken
    parts: list[Record]  # of a rollout that several policies share, all but the last
    rollouts: list[Record]
    estimates: list[Record]  # of the reward model, where there is one
    rewards: list[Record]
    carried: list[Record]  # what was left over of the iteration before, which is learned from first
    consumed: int  # questions so far, this iteration's included
    # with a curriculum: its questions -> the first pass over all that may ask them again
    due: Mapping[str, int] = field(default_factory=dict)

    @property
    def scored_trees(self) -> list[ScoredTrees]:
        """Return the trees of each batch with their rewards."""
        trees = [*self.carried, *self.rollouts]
        return [
            ScoredTrees(
                artifacts.output(grown, "trees"),
                artifacts.output(rewarded, "rewards"),
                artifacts.output(rewarded, "parts"),
            )
            for grown, rewarded in zip(trees, [*self.carried, *self.rewards], strict=True)
        ]

    def records(self) -> dict[str, list[Record]]:
        """Return the records by verb; a verb that was not called has no entry."""
        called = {
            "rollout": self.rollouts,
            "reward": self.rewards,
            "rollout_part": self.parts,
            "estimate": self.estimates,
            "carry": self.carried,
        }
        return {verb: records for verb, records in called.items() if records}


@dataclass(frozen=True)
class PartialBatch:
    """What earlier policies have sampled of a batch: by whom, and the records of these parts."""

    samplers: Mapping[int, Artifact]
    parts: list[Record]

    @property
    def newest(self) -> Artifact | None:
        """Return the part that the next one goes on from; None where there is none."""
        return artifacts.output(self.parts[-1], "part") if self.parts else None


@dataclass(frozen=True)
class Surplus:
    """Groups that an iteration has sampled and not needed: among which trees, and by whom."""

    batches: Sequence[ScoredTrees] = ()
    questions: tuple[str, ...] = ()
    samplers: Mapping[int, Artifact] = field(default_factory=dict)


EMPTY = PartialBatch({}, [])
NONE_LEFT = Surplus()
NOTHING_RESTS: Mapping[str, int] = MappingProxyType({})


def sample(
    training: Training,
    step: SubStep,
    agents: Agents,
    consumed: int,
    begun: PartialBatch = EMPTY,
    due: Mapping[str, int] = NOTHING_RESTS,
    surplus: Surplus = NONE_LEFT,
) -> ScoredBatch:
    """Roll out and score a batch; with a group filter, more until enough groups have a spread.

    ``consumed``: questions that earlier iterations have taken, with a curriculum the place in the
    passes. ``begun``: what is there of the batch. ``due``: the curriculum's, of earlier batches.
    ``surplus``: of the iteration before; where its questions are asked again, the new group counts.
    """
    curriculum = training.recipe.reinforce.curriculum
    chosen, left = Chosen(place=consumed), surplus.questions
    passes: dict[str, int] = {}
    rollouts: list[Record] = []
    estimates: list[Record] = []
    rewards: list[Record] = []
    for attempt in range(MOST_BATCHES):
        inputs = replace(rollout_inputs(training, agents, consumed, attempt), before=begun.newest)
        if curriculum:
            chosen = _next(training, step, chosen.place, due, passes)
            if attempt and not chosen.passes:
                break
            passes |= chosen.passes
            inputs = replace(inputs, chosen=tuple(chosen.passes))
        rolled_out = rollout(
            step, inputs, environment=training.environment, acting=acting_in(training)
        )
        rollouts.append(rolled_out)
        estimated, rewarded = _score(training, step, agents, rolled_out)
        estimates += [estimated] if estimated else []
        rewards.append(rewarded)
        left = tuple(one for one in left if one not in rolled_out["questions"])
        if is_enough(training, rewards, len(left)) or not rolled_out["another_batch"]:
            break
    carried = [carry(step, _carry_inputs(surplus, left))] if left else []
    earlier = surplus.samplers if left else {}
    samplers = {**begun.samplers, **earlier, agents.steps: agents.policy}
    records = (begun.parts, rollouts, estimates, rewards, carried)
    if curriculum is None:
        consumed += len(rollouts) * training.recipe.reinforce.questions
        return ScoredBatch(samplers, *records, consumed)
    alike = {question for record in rewards for question in record.get("without_spread", ())}
    return ScoredBatch(samplers, *records, chosen.place, due_after(passes, alike, curriculum.rest))


def surplus_of(scored: ScoredBatch, agents: Agents, credited: Record) -> Surplus:
    """Return what an iteration leaves over: groups of its own batches that it did not need.

    ``agents`` have sampled it; ``credited`` is the record of its advantages.
    """
    samplers = {agents.steps: agents.policy}
    return Surplus(scored.scored_trees, tuple(credited["surplus"]), samplers)


def _carry_inputs(surplus: Surplus, questions: tuple[str, ...]) -> CarryInputs:
    batches = surplus.batches
    return CarryInputs(
        [batch.trees for batch in batches],
        [batch.rewards for batch in batches],
        [batch.parts for batch in batches if batch.parts],
        questions,
    )


def _score(
    training: Training, step: SubStep, agents: Agents, rolled_out: Record
) -> tuple[Record | None, Record]:
    """Return what the reward model estimates of a batch, where there is one, and its rewards."""
    estimated = None
    if agents.reward_model:
        estimated = estimate(step, estimate_inputs(training, agents.reward_model, rolled_out))
    rewarded = reward(
        step,
        reward_inputs(training, rolled_out, estimated),
        reader=training.reader,
        open_policy=judges_of(training.recipe),
    )
    return estimated, rewarded


def _next(
    training: Training, step: SubStep, place: int, due: Mapping[str, int], asked: Collection[str]
) -> Chosen:
    """Return the questions of the next batch of an iteration, as the curriculum has them."""
    ids = question_ids(Path(training.questions.path))
    size = training.recipe.reinforce.questions
    return choose(ids, step.seed, place, size, due, asked)


def is_enough(training: Training, rewards: list[Record], carried: int = 0) -> bool:
    """Return whether an iteration needs no further batch; ``carried``: groups of the one before.

    With a group filter it goes on until as many groups have a spread as it takes questions, as in
    DAPO (arXiv 2503.14476, section 3.2).
    """
    spread = carried + sum(record["groups_with_spread"] for record in rewards)
    enough = training.recipe.reinforce.questions
    return training.algorithm.group_filter == "none" or spread >= enough


def sample_part(
    training: Training, step: SubStep, agents: Agents, consumed: int, begun: PartialBatch
) -> PartialBatch:
    """Roll out some turns of a batch, with which the next policy goes on."""
    inputs = replace(
        rollout_inputs(training, agents, consumed, 0),
        before=begun.newest,
        turns=training.recipe.reinforce.turns_per_policy,
    )
    part = rollout_part(step, inputs, environment=training.environment, acting=acting_in(training))
    samplers = {**begun.samplers, agents.steps: agents.policy}
    return PartialBatch(samplers, [*begun.parts, part])


def acting_in(training: Training) -> Callable[[Path, Machine], Learner]:
    """Return what loads the policy that samples: a copy where it samples ahead."""
    policies = resident.POLICIES
    return policies.load_copy if training.recipe.reinforce.ahead else policies.load_learner

"""Reinforcement learning, as in Algorithm 1 of ARPO (arXiv 2507.19849).

For each iteration: take a batch of questions, keep the policy that samples, roll out with beaming,
score the leaves (and take further batches while too few groups have a spread, where the algorithm
asks for it), estimate advantages, update the policy. Every few iterations, ask the policy the
validation questions.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from params.schema.reinforce import Keep
from tasks.advantage import advantage
from tasks.ledger.artifacts import Artifact, PrunedError
from tasks.ledger.substeps import SubStep
from tasks.policy import resident
from tasks.training.agents import Agents
from tasks.training.batches import Batches, sampling_thread
from tasks.training.inputs import advantage_inputs, update_inputs
from tasks.training.iteration import Iteration
from tasks.training.learned_reward import LearnedReward
from tasks.training.sampling import ScoredBatch, surplus_of
from tasks.training.setup import Training
from tasks.training.validating import best_so_far, is_due, validate
from tasks.trees import validation
from tasks.trees.validation import Validated
from tasks.update import update

Result = TypeVar("Result")


def train(training: Training) -> Generator[Iteration, None, None]:
    """Yield the records of one iteration after the other.

    With ``ahead``, batches are sampled before their turn, while others are learned from: see
    ``Batches``.

    Where the training has an exam, the first policy is asked the validation questions in the first
    iteration, and the policies of every so many iterations and of the last one after their update.

    Raises PrunedError where an iteration that the ledger does not hold needs weights that are gone.
    """
    agents, rewarding = Agents.first(training), LearnedReward(training)
    validated: list[tuple[Artifact, Validated]] = []  # trained policies, and what they got
    section = training.recipe.reinforce
    with sampling_thread(section.ahead) as thread:
        batches = Batches(training, thread)
        for number in range(training.iterations):
            step = replace(training.start, iteration=number)
            agents = agents.at(number, training.algorithm)
            exams = validate(training, agents.policy, 0) if number == 0 else []
            batches.begin(number, agents)
            scored = batches.scored(number)
            needed = [agents.reference, *best_so_far(training, validated)]
            done = learn(training, step, agents, scored, [*needed, *batches.samplers(number)])
            if record := rewarding.learn(step, agents, scored):
                done = {**done, "reward_model": [record]}
            batches.surplus = surplus_of(scored, agents, done["advantage"][0])
            agents = agents.after(done, training.algorithm)
            if is_due(training, number + 1) or number + 1 == training.iterations:
                batches.wait()  # an engine may hold one policy at a time
                records = validate(training, agents.policy, number + 1)
                validated += [(agents.policy, one) for one in validation.validated(records)]
                exams += records
            needed = [agents.reference, *best_so_far(training, validated)]
            forget(step, section.keep, [*needed, *batches.samplers(number + 1)])
            yield {**done, "validation": exams} if exams else done


def learn(
    training: Training,
    step: SubStep,
    agents: Agents,
    scored: ScoredBatch,
    needed: Sequence[Artifact],
) -> Iteration:
    """Estimate advantages of the scored trees and update the policy.

    ``needed``: older policies that stay when room is made for the new one.
    """
    learners, batch = training.learners, (dict(scored.samplers), scored.scored_trees)
    credited = advantage(step, advantage_inputs(training, agents, *batch), learners=learners)
    if training.recipe.machine.processes > 1:  # the copy here has sampled; processes learn
        resident.POLICIES.learner = None
    inputs = update_inputs(training, agents, *batch, credited)
    make_room = partial(forget, step, training.recipe.reinforce.keep, needed, least=2)
    updated = update(step, inputs, make_room=make_room, learners=learners)
    return {**scored.records(), "advantage": [credited], "update": [updated]}


def forget(step: SubStep, keep: Keep, needed: Sequence[Artifact], least: int = 1) -> None:
    """Drop checkpoints that the recipe does not keep; trees, rewards and advantages stay.

    The newest ``least`` stay in any case: before this iteration has one, that is the last one's.
    Tables of tokens stay, too: ``collect`` joins them.
    """
    last = max(least, keep.optimizer_last)
    weights = ("policy", "critic")
    step.ledger.retire(step, "update", last, keep.weights_every, weights, needed, ["tokens"])


def replaying(start: SubStep, work: Callable[[], Result]) -> Result:
    """Return ``work()``; where it needs updates that the ledger has pruned, replay them."""
    try:
        return work()
    except PrunedError as error:
        print(f"{error}: the updates that the ledger has pruned are replayed from its trees")
        start.ledger.revive(start.folder)
        return work()

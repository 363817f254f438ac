"""Reinforcement learning, as in Algorithm 1 of ARPO (arXiv 2507.19849).

For each iteration: take a batch of questions, keep the policy that samples, roll out with beaming,
score the leaves (and take further batches while too few groups have a spread, where the algorithm
asks for it), estimate advantages, update the policy. Every few iterations, ask the policy the
validation questions. Reports are in tracking/reinforce_report.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from prefect import flow

from flows.tracking import gate_report, reinforce_report
from flows.tracking.alarm_report import Watch
from flows.tracking.progress import Progress
from flows.tracking.run import Run, stage_run
from flows.workers import stage, substep_tasks
from params.schema import recipe as schema
from params.schema.algorithms import MOST_BATCHES, Algorithm, Marks
from params.schema.base import Machine
from params.schema.recipe import Recipe
from params.schema.reinforce import Keep
from tasks import settings
from tasks.advantage import AdvantageInputs, advantage
from tasks.collect import CURVE, TABLES, CollectInputs, collect, publish_collected
from tasks.dialects import open_dialect
from tasks.environments import open_environment
from tasks.environments.contract import OpenEnvironment
from tasks.estimate import EstimateInputs, estimate
from tasks.exam import Exam, answer, judges_of
from tasks.learning import replay
from tasks.learning.batch import UpdateInputs
from tasks.learning.processes import HERE, Learners, open_learners
from tasks.ledger import artifacts, keys
from tasks.ledger.artifacts import Artifact, PrunedError, Record
from tasks.ledger.substeps import Step
from tasks.policy import checkpoint, published_model, resident
from tasks.policy.machine import use_machine
from tasks.policy.model import load_tokenizer
from tasks.policy.parallel import with_threads
from tasks.policy.published_model import Published
from tasks.policy.resident import Learner
from tasks.reward import RewardInputs, reward
from tasks.reward_model import RewardModelInputs, reward_model
from tasks.rewards import judging
from tasks.rewards.scoring import Reader
from tasks.rollout import RolloutInputs, rollout, rollout_part
from tasks.trees import validation
from tasks.trees.validation import Validated
from tasks.update import update

# verb -> records of its calls; "validation", where it was asked -> those of the policies' exams;
# "rollout_part", where several policies share a rollout
Iteration = Mapping[str, Sequence[Record]]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Training:
    """What a training run is made of; ``start`` is its first iteration's step."""

    start: Step
    recipe: Recipe
    algorithm: Algorithm
    policy: Artifact
    questions: Artifact
    corpus: Artifact
    environment: OpenEnvironment
    reader: Reader  # of the agent's turns: the dialect
    exam: Exam | None = None  # the validation questions; None: they are not asked
    learners: Learners = HERE  # where the policy learns
    reward_model: Published | None = None  # that training begins with; None: there is none

    @cached_property
    def judged(self) -> dict[str, Any]:
        """Return what decides rewards and is not in the recipe; read from its files once."""
        return {
            "sources": settings.reward_sources(self.recipe, Path("params")),
            **judging.inputs(self.recipe, Path("params"), evaluation=False),
            **(labelled(self.recipe) if self.reward_model else {}),
        }


@dataclass(frozen=True)
class Scored:
    """An iteration's rollouts and their rewards, a record a batch, and who sampled them."""

    samplers: Mapping[int, Artifact]  # by the optimizer steps that each had taken
    parts: list[Record]  # of a rollout that several policies share, all but the last
    rollouts: list[Record]
    estimates: list[Record]  # of the reward model, where there is one
    rewards: list[Record]
    place: int  # questions consumed so far, this iteration's included

    @property
    def batches(self) -> list[replay.ScoredTrees]:
        """Return the trees of each batch with their rewards."""
        return [
            replay.ScoredTrees(
                artifacts.output(grown, "trees"), artifacts.output(scored, "rewards")
            )
            for grown, scored in zip(self.rollouts, self.rewards, strict=True)
        ]


@dataclass(frozen=True)
class Begun:
    """What earlier policies have sampled of a batch: by whom, and the records of these parts."""

    samplers: Mapping[int, Artifact]
    parts: list[Record]

    @property
    def newest(self) -> Artifact | None:
        """Return the part that the next one goes on from; None where there is none."""
        return artifacts.output(self.parts[-1], "part") if self.parts else None


NOT_BEGUN = Begun({}, [])


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

    def at(self, iteration: int, algorithm: Algorithm) -> Agents:
        """Return the agents with the reference that holds from this iteration on."""
        kl = algorithm.kl
        refreshed = kl and kl.refresh and iteration % kl.refresh == 0
        return replace(self, reference=self.policy) if refreshed else self

    def after(self, done: Iteration, algorithm: Algorithm) -> Agents:
        """Return what the next iteration begins with."""
        updated = done["update"][0]
        critic = artifacts.output(updated, "critic") if algorithm.critic else None
        optimizer = artifacts.output(updated, "optimizer")
        steps = self.steps + int(updated["metrics"]["optimizer_steps"])
        kept = self.reference, self.reward_model
        return Agents(policy_of(done), steps, optimizer, critic, *kept)


# ---------------------------------------------------------------- Algorithm 1


def train(training: Training, iterations: int) -> Generator[Iteration, None, None]:
    """Yield the records of one iteration after the other.

    With ``ahead``, batches are sampled before their turn, while others are learned from: see
    ``Batches``.

    Where the training has an exam, the first policy is asked the validation questions in the first
    iteration, and the policies of every so many iterations and of the last one after their update.

    Raises PrunedError where an iteration that the ledger does not hold needs weights that are gone.
    """
    algorithm, chosen = training.algorithm, training.recipe.reinforce
    began = training.reward_model
    model = began.model if began else None
    agents = Agents(training.policy, 0, None, None, training.policy, model)
    rewarding = LearnedReward(training)
    asked: list[tuple[Artifact, Validated]] = []  # trained policies, and what they got
    with sampling_thread(chosen.ahead) as thread:
        batches = Batches(training, iterations, thread)
        for number in range(iterations):
            step = replace(training.start, iteration=number)
            agents = agents.at(number, algorithm)
            exams = validate(training, agents.policy, 0) if number == 0 else []
            batches.begin(number, agents)
            scored = batches.scored(number)
            spare = [*spared(training, agents, asked), *batches.samplers(number)]
            done = learn(training, step, agents, scored, spare)
            agents = agents.after(done, algorithm)
            if made := rewarding.learn(step, agents, scored):
                done = {**done, "reward_model": [made]}
                agents = replace(agents, reward_model=artifacts.output(made, "model"))
            if is_asked(training, number + 1) or number + 1 == iterations:
                batches.wait()  # an engine may hold one policy at a time
                answered = validate(training, agents.policy, number + 1)
                asked += [(agents.policy, one) for one in validation.validated(answered)]
                exams += answered
            spare = [*spared(training, agents, asked), *batches.samplers(number + 1)]
            forget(step, chosen.keep, spare)
            yield {**done, "validation": exams} if exams else done


class LearnedReward:
    """The replay buffer, and the training of the reward model at the end of iterations."""

    def __init__(self, training: Training) -> None:
        self.training = training
        began = training.reward_model
        self.buffer = replay.Buffer(
            (replay.ScoredTrees(began.trees, began.rewards),) if began else ()
        )
        self.models: list[Artifact] = []  # with which the batches of the iterations were scored

    def learn(self, step: Step, agents: Agents, scored: Scored) -> Record | None:
        """Add an iteration to the buffer; return the record of a training, if one is due.

        The next batch that is begun is scored by the new model, and those that were begun before by
        the one that they began with.
        """
        recipe = self.training.recipe
        chosen, model = recipe.reward_model, agents.reward_model
        if chosen is None or chosen.again is None or model is None:
            return None
        self.buffer = self.buffer.add(scored.batches, chosen.again)
        self.models.append(model)
        if not chosen.again.due(step.iteration):
            return None
        inputs = RewardModelInputs(
            policy=self.training.policy,
            before=model,
            trees=[batch.trees for batch in self.buffer.batches],
            rewards=[batch.rewards for batch in self.buffer.batches],
            first_batches=len(self.buffer.first_batches),
            labels=settings.labels_of(recipe),
            settings=chosen,
            steps=chosen.again.steps,
            machine=recipe.machine,
        )
        made = reward_model(step, inputs)
        every, waiting = recipe.reinforce.keep.weights_every, recipe.reinforce.ahead
        spare = self.models[-1 - waiting :]
        step.ledger.retire(step, "reward_model", 1, every, ["model"], spare)
        return made


class AtOnce(Executor):
    """Does work where it is submitted: nothing is sampled ahead."""

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*given, **named))
        return done


@contextmanager
def sampling_thread(ahead: int) -> Iterator[Executor]:
    """Yield what samples batches in the order of submission; at the end none is begun any more."""
    thread = with_threads(torch.get_num_threads(), 1, "ahead") if ahead else AtOnce()
    try:
        yield thread
    finally:
        thread.shutdown(cancel_futures=True)


def batches_of(policy: int, ahead: int, shared: bool) -> range:
    """Return the iterations whose batches the policy after so many iterations samples, in order.

    Batch i is sampled by policy i - ``ahead``, or ``shared`` by all policies from that one to
    policy i - 1; policy 0 takes the place of those before it.
    """
    first = policy + (1 if shared else ahead)
    return range(first if policy else 0, policy + ahead + 1)


class Batches:
    """The batches of a training run, up to ``ahead`` of which are sampled before their turn.

    All of them are sampled in order, one after the other, so that each begins with the questions
    that follow those of the one before. Which policy samples a batch depends on counters alone.
    Where policies share batches, a batch rests after some turns until the next policy is there.
    """

    def __init__(self, training: Training, iterations: int, thread: Executor) -> None:
        self.training, self.iterations, self.thread = training, iterations, thread
        self.waiting: dict[int, Future[Scored]] = {}  # iteration -> its batch
        self.last: Future[Any] | None = None  # what was submitted last
        self.policies: list[Artifact] = []  # that the iterations so far began with
        # Used by the thread alone: the place of the next question, and the batches that rest.
        self.place = 0
        self.begun: dict[int, Begun] = {}

    def begin(self, number: int, agents: Agents) -> None:
        """Have the batches sampled whose policy an iteration begins with."""
        self.policies.append(agents.policy)
        chosen = self.training.recipe.reinforce
        shared = chosen.turns_per_policy is not None
        for batch in batches_of(number, chosen.ahead, shared):
            if batch < self.iterations:
                rests = shared and batch > number + 1
                context = copy_context()  # Prefect's: the flow run that the sub-steps belong to
                work = self._sample_part if rests else self._sample
                self.last = self.thread.submit(context.run, work, batch, agents, self.last)
                if not rests:
                    self.waiting[batch] = self.last

    def _sample(self, batch: int, agents: Agents, before: Future[Any] | None) -> Scored:
        """Sample a batch to its end."""
        step, begun = self._go_on(batch, before)
        scored = sample(self.training, step, agents, self.place, begun)
        self.place = scored.place
        return scored

    def _sample_part(self, batch: int, agents: Agents, before: Future[Any] | None) -> None:
        """Sample a batch until it rests. Each batch takes as many questions as the others."""
        step, begun = self._go_on(batch, before)
        place = batch * self.training.recipe.reinforce.questions
        self.begun[batch] = sample_part(self.training, step, agents, place, begun)

    def _go_on(self, batch: int, before: Future[Any] | None) -> tuple[Step, Begun]:
        """Return what a batch goes on from. Raises what the work before it has raised."""
        if before:
            before.result()
        step = replace(self.training.start, iteration=batch)
        return step, self.begun.pop(batch, NOT_BEGUN)

    def scored(self, number: int) -> Scored:
        """Return an iteration's batch as soon as it is there."""
        return self.waiting.pop(number).result()

    def samplers(self, number: int) -> list[Artifact]:
        """Return the policies so far that sample the batches from an iteration's on."""
        return self.policies[max(0, number - self.training.recipe.reinforce.ahead) :]

    def wait(self) -> None:
        """Return when all batches that have begun are there."""
        wait(self.waiting.values())


def sample(
    training: Training, step: Step, agents: Agents, place: int, begun: Begun = NOT_BEGUN
) -> Scored:
    """Roll out and score a batch; with a group filter, more until enough groups have a spread.

    ``place``: questions consumed by earlier iterations. ``begun``: what is there of the batch.
    """
    chosen, algorithm = training.recipe.reinforce, training.algorithm
    acting = acting_in(training)
    rollouts: list[Record] = []
    estimates: list[Record] = []
    rewards: list[Record] = []
    spread = 0
    for attempt in range(MOST_BATCHES):
        inputs = replace(rollout_inputs(training, agents, place, attempt), before=begun.newest)
        rollouts.append(rollout(step, inputs, environment=training.environment, acting=acting))
        if agents.reward_model:
            given = estimate_inputs(training, agents.reward_model, rollouts[-1])
            estimates.append(estimate(step, given))
        rewards.append(
            reward(
                step,
                reward_inputs(training, rollouts[-1], estimates[-1] if estimates else None),
                reader=training.reader,
                open_policy=judges_of(training.recipe),
            )
        )
        spread += rewards[-1]["groups_with_spread"]
        enough = algorithm.group_filter == "none" or spread >= chosen.questions
        if enough or not rollouts[-1]["another_batch"]:
            break
    samplers = {**begun.samplers, agents.steps: agents.policy}
    place += len(rollouts) * chosen.questions
    return Scored(samplers, begun.parts, rollouts, estimates, rewards, place)


def sample_part(training: Training, step: Step, agents: Agents, place: int, begun: Begun) -> Begun:
    """Roll out some turns of a batch, with which the next policy goes on."""
    inputs = replace(
        rollout_inputs(training, agents, place, 0),
        before=begun.newest,
        turns=training.recipe.reinforce.turns_per_policy,
    )
    acting = acting_in(training)
    part = rollout_part(step, inputs, environment=training.environment, acting=acting)
    return Begun({**begun.samplers, agents.steps: agents.policy}, [*begun.parts, part])


def acting_in(training: Training) -> Callable[[Path, Machine], Learner]:
    """Return what loads the policy that samples: a copy where it samples ahead."""
    policies = resident.POLICIES
    return policies.load_copy if training.recipe.reinforce.ahead else policies.load_learner


def learn(
    training: Training, step: Step, agents: Agents, scored: Scored, spare: Sequence[Artifact]
) -> Iteration:
    """Estimate advantages of the scored trees and update the policy.

    ``spare``: older policies that stay when room is made for the new one.
    """
    learners = training.learners
    credited = advantage(step, advantage_inputs(training, agents, scored), learners=learners)
    if training.recipe.machine.processes > 1:  # the copy here has sampled; processes learn
        resident.POLICIES.learner = None
    inputs = update_inputs(training, agents, scored, credited)
    keep = training.recipe.reinforce.keep
    make_room = partial(forget, step, keep, spare, least=2)
    updated = update(step, inputs, make_room=make_room, learners=learners)
    sampled = {"rollout": scored.rollouts, "reward": scored.rewards}
    if scored.parts:
        sampled["rollout_part"] = scored.parts
    if scored.estimates:
        sampled["estimate"] = scored.estimates
    return {**sampled, "advantage": [credited], "update": [updated]}


def forget(step: Step, keep: Keep, spare: Sequence[Artifact], least: int = 1) -> None:
    """Drop checkpoints that the recipe does not keep; trees, rewards and advantages stay.

    The newest ``least`` stay in any case: before this iteration has one, that is the last one's.
    Tables of tokens stay, too: ``collect`` joins them.
    """
    last = max(least, keep.optimizer_last)
    weights = ("policy", "critic")
    step.ledger.retire(step, "update", last, keep.weights_every, weights, spare, ["tokens"])


def policy_of(iteration: Iteration) -> Artifact:
    """Return the policy that an iteration has made."""
    return artifacts.output(iteration["update"][0], "policy")


# ---------------------------------------------------------------- validation


def is_asked(training: Training, iterations: int) -> bool:
    """Return whether a policy that has learned from so many iterations is asked in any case."""
    chosen = training.recipe.reinforce.validation
    return chosen is not None and iterations % chosen.every == 0


def validate(training: Training, policy: Artifact, iterations: int) -> list[Record]:
    """Ask a policy that has learned from so many iterations the validation questions.

    Returns the records of its rollout and reward; none where the training has no exam.
    """
    if training.exam is None:
        return []
    start = training.start
    step = replace(start, stage=f"{start.stage}/validation", iteration=iterations)
    return answer(training.exam, step, policy)


def asked_in(done: Sequence[Iteration]) -> list[Validated]:
    """Return what the policies of these iterations got for the validation questions."""
    return validation.validated([one for entry in done for one in entry.get("validation", ())])


def spared(
    training: Training, agents: Agents, asked: Sequence[tuple[Artifact, Validated]]
) -> list[Artifact]:
    """Return the policies that stay however old: the reference, and the best if it is published."""
    chosen = training.recipe.reinforce.validation
    if not asked or chosen is None or chosen.publish == "last":
        return [agents.reference]
    best = validation.best([one for _, one in asked], training.recipe.verdict.measure)
    return [agents.reference, *(policy for policy, one in asked if one is best)]


def published(training: Training, done: Sequence[Iteration]) -> int:
    """Return the iteration whose policy is published: the last, or the best by validation."""
    chosen = training.recipe.reinforce.validation
    if training.exam is None or chosen is None or chosen.publish == "last":
        return len(done) - 1
    return validation.best(asked_in(done), training.recipe.verdict.measure).iterations - 1


# ---------------------------------------------------------------- inputs of the verbs


def rollout_inputs(training: Training, agents: Agents, place: int, attempt: int) -> RolloutInputs:
    """Return what a batch of rollouts is made from."""
    recipe, algorithm = training.recipe, training.algorithm
    return RolloutInputs(
        policy=agents.policy,
        policy_steps=agents.steps,
        questions=training.questions,
        size=recipe.reinforce.questions,
        first=place,
        attempt=attempt,
        branching=algorithm.branching,
        marks=algorithm.marks if algorithm.branching == "marks" else Marks(kind="none"),
        budget=recipe.reinforce.rollout,
        top_p=1.0,
        agent=settings.agent_of(recipe),
        corpus=training.corpus,
    )


def labelled(recipe: Recipe) -> dict[str, Any]:
    """Return which questions have labels, and whether others are scored, too."""
    assert recipe.reward_model, "a reward model has its section"
    only = recipe.reward_model.scored == "labelled"
    return {"labels": settings.labels_of(recipe), "labelled_only": only}


def estimate_inputs(training: Training, model: Artifact, rolled_out: Record) -> EstimateInputs:
    """Return what the reward model's estimates of a batch are made from."""
    chosen = training.recipe.reward_model
    assert chosen, "a reward model has its section"
    return EstimateInputs(
        model=model,
        trees=artifacts.output(rolled_out, "trees"),
        micro_batch_tokens=chosen.micro_batch_tokens,
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
        **training.judged,
    )


def advantage_inputs(training: Training, agents: Agents, scored: Scored) -> AdvantageInputs:
    """Return what an iteration's advantages are made from."""
    recipe, algorithm = training.recipe, training.algorithm
    return AdvantageInputs(
        policy=agents.policy,
        samplers=scored.samplers,
        critic=agents.critic,
        reference=agents.reference if algorithm.kl_in("reward") else None,
        trees=[artifacts.output(record, "trees") for record in scored.rollouts],
        rewards=[artifacts.output(record, "rewards") for record in scored.rewards],
        algorithm=algorithm,
        questions=recipe.reinforce.questions,
        settings=recipe.reinforce.update,
        temperature=recipe.reinforce.rollout.temperature,
        response_tokens=recipe.dialogue.response_tokens,
        machine=recipe.machine,
        step_weight=settings.step_weight(recipe),
    )


def update_inputs(
    training: Training, agents: Agents, scored: Scored, credited: Record
) -> UpdateInputs:
    """Return what an iteration's update is made from."""
    recipe, algorithm = training.recipe, training.algorithm
    return UpdateInputs(
        policy=agents.policy,
        policy_steps=agents.steps,
        samplers=scored.samplers,
        optimizer=agents.optimizer,
        critic=agents.critic,
        reference=agents.reference if algorithm.kl_in("loss") else None,
        trees=[artifacts.output(record, "trees") for record in scored.rollouts],
        advantages=artifacts.output(credited, "advantages"),
        algorithm=algorithm,
        settings=recipe.reinforce.update,
        temperature=recipe.reinforce.rollout.temperature,
        response_tokens=recipe.dialogue.response_tokens,
        machine=recipe.machine,
        lora=recipe.lora,
    )


def collect_inputs(training: Training, done: Sequence[Iteration]) -> CollectInputs:
    """Return what the checks of a whole training are made from."""
    recipe = training.recipe
    exams = [made for entry in done for made in entry.get("validation", ())]
    return CollectInputs(
        leaves=recipe.reinforce.rollout.leaves,
        reward=recipe.reinforce.reward,
        algorithm=training.algorithm,
        dialogue=recipe.dialogue,
        tables=[tables_of(iteration) for iteration in done],
        metrics=[
            {verb: [made["metrics"] for made in iteration[verb]] for verb in CURVE}
            for iteration in done
        ],
        validation={
            made["step"]["iteration"]: artifacts.output(made, "rewards")
            for made in exams
            if made["verb"] == "reward"
        },
    )


def tables_of(iteration: Iteration) -> dict[str, list[Artifact]]:
    """Return the tables that an iteration has made, by name; [] for those that it has not."""
    return {
        name: [
            artifacts.output(made, name)
            for made in iteration.get(verb, ())
            if name in made["artifacts"]
        ]
        for name, verb in TABLES.items()
    }


def reader_of(recipe: Recipe, policy: Artifact, environment: OpenEnvironment) -> Reader:
    """Return what reads the turns of a policy: the recipe's dialect, for its tokenizer."""
    tokenizer = load_tokenizer(policy.path)
    return open_dialect(recipe.dialect, tokenizer, recipe.dialogue, environment.specs)


# ---------------------------------------------------------------- the stage


@flow(name="reinforce")
def reinforce(recipe: str) -> None:
    """Train ``models/<recipe>/cold_start`` into ``models/<recipe>/trained``; keep all trees."""
    chosen = settings.load(recipe, Path("params"))
    algorithm = schema.algorithm_of(chosen, Path("params"))
    questions = Artifact.at(Path("data", recipe, "questions", "train.parquet"))
    corpus = Artifact.at(Path("data", recipe, "corpus"))
    policy = Artifact.at(Path("models", recipe, "cold_start"))
    learned = reward_model_of(chosen, recipe)
    use_machine(chosen.machine)
    learned_from = [learned.model, learned.trees, learned.rewards] if learned else []
    key = keys.stage_key(chosen, questions, corpus, policy, *learned_from)
    with (
        substep_tasks.opened() as ledger,
        stage_run(recipe, "reinforce", key, stage.run_tags()) as run,
        open_environment(
            chosen.tools, chosen.environment, chosen.machine.threads, Path(corpus.path)
        ) as environment,
        gate_report.pages(recipe),
        open_learners(chosen.machine) as learners,
    ):
        start = Step(recipe, "reinforce", 0, chosen.seed, ledger)
        reader = reader_of(chosen, policy, environment)
        exam = exam_of(chosen, recipe, corpus, environment, reader)
        training = Training(
            *(start, chosen, algorithm, policy, questions, corpus, environment, reader),
            *(exam, learners, learned),
        )
        done, seconds = replaying(start, partial(run_all, training, run))
        reinforce_report.log_figures(run, done, chosen, recipe)
        reinforce_report.report_time(run, seconds)


def exam_of(
    recipe: Recipe, name: str, corpus: Artifact, environment: OpenEnvironment, reader: Reader
) -> Exam | None:
    """Return what policies are asked during training; None where the recipe has no validation."""
    chosen = recipe.reinforce.validation
    if chosen is None:
        return None
    questions = Artifact.at(Path("data", name, "questions", "validation.parquet"))
    panel = Artifact.at(Path("data", name, "panels", "validation.json"))
    return Exam(
        recipe,
        questions,
        panel,
        corpus,
        environment,
        reader,
        size=chosen.questions,
        samples=chosen.samples,
        evaluation=False,
    )


def reward_model_of(recipe: Recipe, name: str) -> Published | None:
    """Return the reward model that training begins with; None where the recipe has none.

    Raises ValueError where the stage reward_model has not made it.
    """
    if recipe.reward_model is None:
        return None
    folder, fault = Path("models", name, "reward_model"), "it says that there is none"
    try:
        if made := published_model.published(folder):
            return made
    except ValueError as error:
        fault = str(error).partition(":")[0]
    raise ValueError(
        f"params/{name}.yaml has the section reward_model, and {folder} has no reward model "
        f"({fault}): run `dvc repro reward_model@{name}`"
    )


def replaying(start: Step, work: Callable[[], Result]) -> Result:
    """Return ``work()``; where it needs updates that the ledger has pruned, replay them."""
    try:
        return work()
    except PrunedError as error:
        print(f"{error}: the updates that the ledger has pruned are replayed from its trees")
        start.ledger.revive(start.folder)
        return work()


def run_all(training: Training, run: Run) -> tuple[list[Iteration], list[reinforce_report.Seconds]]:
    """Train, check the tables of all iterations, and publish ``models/<recipe>/trained``.

    Returns the records of each iteration, and the seconds by part of those that were computed now.
    Raises StoppedError for an alarm that the recipe stops on.
    """
    recipe, name = training.recipe, training.start.recipe
    done: list[Iteration] = []
    seconds: list[reinforce_report.Seconds] = []
    progress = Progress("reinforce", recipe.reinforce.iterations)
    watch = Watch(name, recipe.reinforce.stop_on, recipe.reinforce.questions)
    began = time.time()
    for iteration in train(training, recipe.reinforce.iterations):
        done.append(iteration)
        seconds += reinforce_report.log_iteration(run, progress, iteration, recipe.reinforce, began)
        finished = iteration["update"][0]["finished"]
        asked = asked_in([iteration])
        reinforce_report.log_validation(run, progress, asked, recipe.seed)
        watch.look(reinforce_report.metrics_of(iteration), asked, run, progress, finished)
        began = time.time()
    progress.close()
    # collect holds the gates: a policy whose trajectories fail one is not published
    inputs = collect_inputs(training, done)
    publish_collected(inputs, collect(training.start, inputs), Path("data", name))
    chosen = published(training, done)
    reinforce_report.report_published(run, chosen, asked_in(done), recipe)
    artifacts.publish(policy_of(done[chosen]), Path("models", name, "trained"), checkpoint.merged)
    (made,) = done[chosen]["update"]
    records = [
        {**record, "published": True} if record is made else record
        for iteration in done
        for record in in_order(iteration)
    ]
    artifacts.publish_records(records, Path("data", name, "records", "reinforce.jsonl"))
    return done, seconds


def in_order(iteration: Iteration) -> list[Record]:
    """Return an iteration's records in execution order; records of batches carry ``attempt``."""
    verbs = [verb for verb in ("rollout", "estimate", "reward") if verb in iteration]
    batches = zip(*(iteration[verb] for verb in verbs), strict=True)
    sampled = [
        {**record, "attempt": attempt} for attempt, made in enumerate(batches) for record in made
    ]
    exams, parts = iteration.get("validation", ()), iteration.get("rollout_part", ())
    learned = [*iteration["advantage"], *iteration["update"], *iteration.get("reward_model", ())]
    return [*parts, *sampled, *learned, *exams]


if __name__ == "__main__":
    stage.main(reinforce)

"""Reinforcement learning, as in Algorithm 1 of ARPO (arXiv 2507.19849).

For each iteration: take a batch of questions, keep the policy that samples, roll out with beaming,
score the leaves (and take further batches while too few groups have a spread, where the algorithm
asks for it), estimate advantages, update the policy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prefect import flow

from flows.tracking import figures, gate_report, traces
from flows.tracking.progress import Progress
from flows.tracking.run import Run, stage_run
from flows.tracking.traces import Trace
from flows.workers import stage
from params.schema import recipe as schema
from params.schema.algorithms import MOST_BATCHES, Algorithm
from params.schema.recipe import Recipe
from params.schema.reinforce import Keep, Reinforce
from tasks.advantage import advantage
from tasks.collect import collect
from tasks.environments.toolbox import Respond, open_tools
from tasks.ledger import artifacts, keys, substeps
from tasks.ledger.artifacts import Artifact, Record, Step
from tasks.policy import checkpoint, resident
from tasks.policy.machine import use_machine
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.rollouts.branching import least_rise
from tasks.trees.metrics import together
from tasks.trees.tables import read_rows
from tasks.update import update

Iteration = Mapping[str, Sequence[Record]]  # verb -> what it left in the ledger
Gathered = tuple[list[Record], list[Record]]  # of an iteration: its rollouts and rewards
Seconds = dict[str, float]  # part of an iteration -> seconds
Result = TypeVar("Result")


@dataclass(frozen=True)
class Agents:
    """What an iteration begins with: policy, optimizer, critic, and the reference of a KL term."""

    policy: Artifact
    optimizer: Artifact | None
    critic: Artifact | None
    reference: Artifact

    def at(self, iteration: int, row: Algorithm) -> Agents:
        """With the reference that holds from this iteration on."""
        refreshed = row.kl and row.kl.refresh and iteration % row.kl.refresh == 0
        return replace(self, reference=self.policy) if refreshed else self

    def after(self, done: Iteration, row: Algorithm) -> Agents:
        """What the next iteration begins with."""
        updated = done["update"][0]
        critic = artifacts.output(updated, "critic") if row.critic else None
        optimizer = artifacts.output(updated, "optimizer")
        return replace(self, policy=policy_of(done), optimizer=optimizer, critic=critic)


@dataclass(frozen=True)
class Training:
    """What a training run is made of."""

    start: Step  # its first iteration's
    recipe: Recipe
    row: Algorithm
    policy: Artifact  # that it begins with
    questions: Artifact
    corpus: Artifact
    tools: Respond


@flow(name="reinforce")
def reinforce(recipe: str) -> None:
    """Make ``models/<recipe>/trained`` of ``models/<recipe>/cold_start``; keep all trees."""
    chosen = schema.load(recipe, Path("params"))
    row = schema.algorithm_of(chosen, Path("params"))
    questions = Artifact.at(Path("data", recipe, "questions", "train.parquet"))
    corpus = Artifact.at(Path("data", recipe, "corpus"))
    policy = Artifact.at(Path("models", recipe, "cold_start"))
    use_machine(chosen.machine)
    key = keys.stage_key(chosen, questions, corpus, policy)
    with (
        stage_run(recipe, "reinforce", key, stage.run_tags()) as run,
        open_tools(chosen, Path(corpus.path)) as tools,
        gate_report.pages(recipe),
    ):
        start = Step(recipe, "reinforce", 0, chosen.seed)
        training = Training(start, chosen, row, policy, questions, corpus, tools)
        done, costs = remembering(start.folder, lambda: learn(training, run))
        picture(run, done, chosen.reinforce)
        account(run, costs)


def remembering(folder: Path, work: Callable[[], Result]) -> Result:
    """What ``work`` returns; where it needs updates that the ledger has pruned, they are replayed.

    ``folder`` is where the ledger keeps them.
    """
    try:
        return work()
    except artifacts.PrunedError as gone:
        print(f"{gone}: the updates that the ledger has pruned are replayed from its trees")
        substeps.revive(folder)
        return work()


def learn(training: Training, run: Run) -> tuple[list[Iteration], list[Seconds]]:
    """All iterations, their tables through the gate, and ``models/<recipe>/trained``.

    Returns what each iteration left, and the seconds by part of those that were done now.
    """
    recipe, settings = training.recipe, training.recipe.reinforce
    done: list[Iteration] = []
    costs: list[Seconds] = []
    progress = Progress("reinforce", settings.iterations)
    began = time.time()
    for iteration in train(training, settings.iterations):
        done.append(iteration)
        costs += report(run, progress, iteration, settings, began)
        began = time.time()
    progress.close()
    # the gate stands in `collect`: a policy whose trajectories fail it is not published
    collect(
        recipe=training.start.recipe,
        settings=settings,
        row=training.row,
        dialogue=recipe.dialogue,
        done=done,
    )
    name = training.start.recipe
    artifacts.publish(policy_of(done[-1]), Path("models", name, "trained"), checkpoint.merged)
    records = [record for iteration in done for record in in_order(iteration)]
    artifacts.publish_records(records, Path("data", name, "records", "reinforce.jsonl"))
    return done, costs


def train(training: Training, count: int) -> Iterator[Iteration]:
    """One iteration after the other; what each left in the ledger.

    Where the recipe samples ahead, the next iteration's questions are rolled out by the policy that
    this one began with, while it learns: what that policy lacks is one iteration's updates, and the
    loss weighs each token by how much likelier it has become (algorithms section 3).

    Raises ledger.PrunedError where an iteration that is not remembered needs weights that are gone.
    """
    row, settings = training.row, training.recipe.reinforce
    agents, place = Agents(training.policy, None, None, training.policy), 0
    coming: Future[Gathered] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        for number in range(count):
            step = replace(training.start, iteration=number)
            agents = agents.at(number, row)
            gathered = coming.result() if coming else gather(training, step, agents.policy, place)
            place += len(gathered[0]) * settings.questions
            if settings.ahead and number + 1 < count:
                later = replace(step, iteration=number + 1)
                call = copy_context()  # Prefect's: whose sub-steps these are
                coming = pool.submit(call.run, gather, training, later, agents.policy, place)
            done = iterate(training, step, agents, gathered)
            agents = agents.after(done, row)
            forget(step, settings.keep, agents.reference, least=1 + settings.ahead)
            yield done


def forget(step: Step, keep: Keep, reference: Artifact, least: int = 1) -> None:
    """Drop checkpoints that the recipe does not keep; trees, rewards and advantages stay.

    The newest stay, at ``least`` so many: before this iteration has one, that is the last one's.
    """
    last, every = max(least, keep.optimizer_last), keep.weights_every
    substeps.retire(step, "update", last, every, weights=("policy", "critic"), spare=reference)


def in_order(iteration: Iteration) -> list[Record]:
    """The records of an iteration as they came to be; those of its batches know which one."""
    batches = zip(iteration["rollout"], iteration["reward"], strict=True)
    gathered = [
        {**record, "attempt": attempt} for attempt, both in enumerate(batches) for record in both
    ]
    return [*gathered, *iteration["advantage"], *iteration["update"]]


def policy_of(iteration: Iteration) -> Artifact:
    """The policy that an iteration has made."""
    return artifacts.output(iteration["update"][0], "policy")


def iterate(training: Training, step: Step, agents: Agents, gathered: Gathered) -> Iteration:
    """The rest of an iteration whose questions are rolled out and rewarded: credit, update."""
    recipe, row = training.recipe, training.row
    settings, response_tokens = recipe.reinforce, recipe.dialogue.response_tokens
    rolled_out, rewarded = gathered
    trees = [artifacts.output(record, "trees") for record in rolled_out]
    in_reward, in_loss = (row.kl is not None and row.kl.place == p for p in ("reward", "loss"))
    credited = advantage(
        step=step,
        policy=agents.policy,
        critic=agents.critic,
        reference=agents.reference if in_reward else None,
        trees=trees,
        rewards=[artifacts.output(record, "rewards") for record in rewarded],
        row=row,
        size=settings.questions,
        settings=settings.update,
        temperature=settings.rollout.temperature,
        response_tokens=response_tokens,
        machine=recipe.machine,
    )
    updated = update(
        step=step,
        policy=agents.policy,
        optimizer=agents.optimizer,
        critic=agents.critic,
        reference=agents.reference if in_loss else None,
        trees=trees,
        advantages=artifacts.output(credited, "advantages"),
        row=row,
        settings=settings.update,
        temperature=settings.rollout.temperature,
        response_tokens=response_tokens,
        machine=recipe.machine,
        lora=recipe.lora,
        make_room=partial(forget, step, settings.keep, agents.reference, least=2),
    )
    return {
        "rollout": rolled_out,
        "reward": rewarded,
        "advantage": [credited],
        "update": [updated],
    }


def gather(training: Training, step: Step, policy: Artifact, place: int) -> Gathered:
    """Roll out and reward a batch; with a group filter, more until enough groups have a spread.

    ``place``: the questions consumed so far.
    """
    recipe, row = training.recipe, training.row
    settings, spread = recipe.reinforce, 0
    rolled_out: list[Record] = []
    rewarded: list[Record] = []
    for attempt in range(MOST_BATCHES):
        rolled_out.append(
            rollout(
                step=step,
                policy=policy,
                questions=training.questions,
                size=settings.questions,
                first=place,
                attempt=attempt,
                branching=row.branching,
                marks=row.marks,
                budget=settings.rollout,
                top_p=1.0,
                dialogue=recipe.dialogue,
                engine=recipe.engine,
                machine=recipe.machine,
                limits=recipe.python,
                search=recipe.search,
                corpus=training.corpus,
                tools=training.tools,
                acting=resident.load_copy if settings.ahead else resident.load_learner,
            )
        )
        rewarded.append(
            reward(
                step=step,
                trees=artifacts.output(rolled_out[-1], "trees"),
                settings=settings.reward,
                overlong=row.overlong,
                response_tokens=recipe.dialogue.response_tokens,
            )
        )
        spread += rewarded[-1]["groups_with_spread"]
        enough = row.group_filter == "none" or spread >= settings.questions
        if enough or not rolled_out[-1]["another_batch"]:
            break
    return rolled_out, rewarded


def report(
    run: Run, progress: Progress, iteration: Iteration, settings: Reinforce, began: float
) -> list[Seconds]:
    """Show one iteration in the terminal and in MLflow; the seconds of its parts.

    An iteration of which the ledger remembers a part was not timed as a whole, and has none.
    """
    records = [record for some in iteration.values() for record in some]
    metrics: dict[str, float] = {}
    for some in iteration.values():
        metrics |= together([record["metrics"] for record in some])
    progress.note(reward=metrics["reward"], success=metrics["success"])
    progress.advance(1)
    number = records[0]["step"]["iteration"]
    finished = records[-1]["finished"]
    parts = seconds(iteration)
    speeds = {
        "sampled_tokens_a_second": metrics["sampled_tokens"] / parts["sampling"],
        "trained_tokens_a_second": metrics["trained_tokens"] / parts["update"],
    }
    tracked = time.time()
    run.log_metrics({**metrics, **speeds}, step=number, at=finished)
    if number % settings.trace_every == 0 and settings.trace_questions:
        run.log_traces(partial(sample, iteration, settings.trace_questions))
    own = [*iteration["advantage"], *iteration["update"]]  # the rest may have been sampled ahead
    if any(record["finished"] < began for record in (own if settings.ahead else records)):
        return []
    now = time.time()
    tracking = now - tracked
    cost = {**parts, "tracking": tracking, "orchestration": now - began - tracking}
    # what was sampled ahead has cost no time of this iteration's own
    cost["orchestration"] = max(0.0, cost["orchestration"] - sum(parts.values()))
    run.log_metrics(
        {f"seconds_{name}": value for name, value in cost.items()}, step=number, at=finished
    )
    return [cost]


def sample(iteration: Iteration, size: int) -> list[Trace]:
    """The trajectories of an iteration's first ``size`` questions, for MLflow's page of traces."""
    rolled_out = iteration["rollout"][0]
    return traces.sample(
        Step(**rolled_out["step"]),
        artifacts.output(rolled_out, "trees"),
        artifacts.output(iteration["reward"][0], "rewards"),
        rolled_out["finished"],
        size,
    )


def seconds(iteration: Iteration) -> Seconds:
    """Seconds of the parts of one iteration, as its sub-steps measured them."""
    spent: Seconds = {}
    for record in [record for some in iteration.values() for record in some]:
        for name, value in record["seconds"].items():
            spent[name] = spent.get(name, 0.0) + value
    return spent


def picture(run: Run, done: Sequence[Iteration], settings: Reinforce) -> None:
    """Figures of the whole run: the learning curve, entropy around tool results, branching."""
    curve: list[dict[str, Any]] = [
        {"iteration": number, **together([r["metrics"] for r in iteration["reward"]])}
        for number, iteration in enumerate(done)
    ]
    run.log_figure(figures.learning_curve(curve), "learning_curve.png")
    profile = [
        {"iteration": number, **point}
        for number, iteration in enumerate(done)
        for point in iteration["rollout"][0]["profile"]
    ]
    if profile:
        run.log_figure(figures.entropy_around_tools(profile), "entropy_around_tools.png")
    last = artifacts.output(done[-1]["rollout"][0], "trees")
    if decided := read_rows(Path(last.path) / "decisions.parquet"):
        rise = least_rise(settings.rollout)
        run.log_figure(figures.decisions(decided, rise), "branching_decisions.png")


def account(run: Run, costs: Sequence[Seconds]) -> None:
    """Where the time of an iteration went: printed, and drawn in MLflow."""
    if not costs:
        return
    mean = {name: sum(cost[name] for cost in costs) / len(costs) for name in costs[0]}
    whole = sum(mean.values())
    print(f"seconds of one iteration, mean of {len(costs)}: {whole:.2f}")
    for name, value in sorted(mean.items(), key=lambda part: -part[1]):
        print(f"  {name:<14}{value:7.3f} {value / whole:6.1%}")
    run.log_figure(figures.seconds_by_part(mean), "seconds_by_part.png")


if __name__ == "__main__":
    stage.main(reinforce)

"""Train the cold start by reinforcement learning; the loop is tasks/training/loop.py.

Reports are in tracking/reinforce_report.py.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from prefect import flow

from flows.pages import live
from flows.tracking import gate_report, policy_check_report, reinforce_report
from flows.tracking.alarm_report import AlarmWatch
from flows.tracking.progress import Progress
from flows.tracking.run import Run, stage_run
from flows.workers import stage, substep_tasks
from params.run_folders import RunFolders
from params.schema.recipe import algorithm_of
from params.schema.teacher import ServerTeacher
from tasks import recipes
from tasks.chat import teacher_scores
from tasks.check_policy import STAGE, check_policy, inputs_of
from tasks.collect import collect, publish_collected
from tasks.learning.learner_group import open_learners
from tasks.ledger import artifacts, keys
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.policy import checkpoint, teacher
from tasks.policy.load_model import load_tokenizer
from tasks.policy.machine import use_machine
from tasks.recipes.opening import open_recipe, reader_of
from tasks.tools.recording import replay_folder
from tasks.training.curves import Seconds
from tasks.training.inputs import collect_inputs
from tasks.training.iteration import Iteration, in_order, policy_of, validated_in
from tasks.training.loop import replaying, train
from tasks.training.setup import Training, reward_model_of
from tasks.training.validating import exam_of, published
from tasks.trees import marks


@flow(name="reinforce")
def reinforce_flow(name: str) -> None:
    """Train ``models/<recipe>/cold_start`` into ``models/<recipe>/trained``; keep all trees."""
    recipe = recipes.load(name, Path("params"))
    folders = RunFolders(name)
    questions = Artifact.at(folders.split("train"))
    corpus = Artifact.at(folders.corpus)
    policy = Artifact.at(folders.cold_start)
    reward_model = reward_model_of(recipe, name)
    use_machine(recipe.machine)
    teaching = teacher.of(folders.teacher, recipe.teacher)
    check_teacher(teaching, folders.cold_start, name)
    learned = [reward_model.model, reward_model.trees, reward_model.rewards] if reward_model else []
    taught = [teaching] if isinstance(teaching, Artifact) else []
    key = keys.stage_key(recipe, questions, corpus, policy, *learned, *taught)
    with (
        substep_tasks.opened() as ledger,
        stage_run(name, "reinforce", key, stage.run_tags()) as run,
        open_recipe(recipe, folders.corpus) as environment,
        gate_report.pages(name),
        open_learners(recipe.machine) as learners,
    ):
        # found in the ledger, unless this worker has another kind of device than the last one
        context, rows = recipe.prepare.policy.context, recipe.reinforce.rollout.rows
        inputs = inputs_of(policy, questions, recipe.engine, recipe.machine, context)
        step = SubStep(name, STAGE, 0, recipe.seed, ledger)
        check = partial(check_policy, step, inputs, policy=policy, rows=rows)
        policy_check_report.reported(run, check)
        reader = reader_of(recipe, policy.path, environment)
        training = Training(
            start=SubStep(name, "reinforce", 0, recipe.seed, ledger),
            recipe=recipe,
            algorithm=algorithm_of(recipe, Path("params")),
            policy=policy,
            questions=questions,
            corpus=corpus,
            environment=environment,
            reader=reader,
            exam=exam_of(recipe, name, corpus, environment, reader),
            learners=learners,
            reward_model=reward_model,
            teacher=teaching,
        )
        iterations, seconds = replaying(training.start, partial(run_all, training, run))
        reinforce_report.log_figures(run, iterations, recipe, name)
        reinforce_report.report_time(run, seconds)


def check_teacher(teaching: Artifact | ServerTeacher | None, learner: Path, recipe: str) -> None:
    """Raise ValueError or RuntimeError where a teacher has other tokens than the policy.

    So it does where a server does not answer; a replay of a run asks no server.
    """
    if isinstance(teaching, Artifact):
        teacher.check_tokens(Path(teaching.path), learner)
    elif teaching and not replay_folder():
        tokenizer = load_tokenizer(learner)
        ids = sorted(tokenizer.get_vocab().values())
        texts = marks.token_texts(tokenizer, ids[-1] + 1)
        teacher_scores.check(teaching, ids, texts, recipe)


def run_all(training: Training, run: Run) -> tuple[list[Iteration], list[Seconds]]:
    """Train and publish; return as ``iterate``. Either may need weights that are gone."""
    iterations, seconds = iterate(training, run)
    publish(training, run, iterations)
    return iterations, seconds


def iterate(training: Training, run: Run) -> tuple[list[Iteration], list[Seconds]]:
    """Train, and report on each iteration when it is done.

    Returns the records of each iteration, and the seconds by part of those that were computed now.
    Raises StoppedError for an alarm that the recipe stops on.
    """
    section, name = training.recipe.reinforce, training.start.recipe
    iterations: list[Iteration] = []
    seconds: list[Seconds] = []
    progress = Progress("reinforce", section.iterations, unit="iterations")
    watch = AlarmWatch(name, section.stop_on, section.questions)
    began = time.time()
    for iteration in train(training):
        iterations.append(iteration)
        computed = reinforce_report.log_iteration(run, progress, iteration, section, began)
        seconds += computed
        finished = iteration["update"][0]["finished"]
        validated = validated_in([iteration])
        reinforce_report.log_validation(run, progress, validated, training.recipe.seed)
        watch.look(reinforce_report.metrics_of(iteration), validated, run, progress, finished)
        # what comes from the ledger is shown with what follows; the last has the whole page
        if validated and computed and len(iterations) < section.iterations:
            page = live.show(training, iterations, list(watch.history.raised.values()))
            if page and len(iterations) == 1:
                progress.write(f"{page} shows the training, and is written at each validation")
        began = time.time()
    progress.close()
    return iterations, seconds


def publish(training: Training, run: Run, iterations: list[Iteration]) -> None:
    """Check the tables of all iterations, and write the stage's outs: ``trained`` and the trees.

    Raises GateError, since a policy whose trajectories fail a gate is not published, and
    PrunedError where the policy to publish is gone.
    """
    recipe, folders = training.recipe, RunFolders(training.start.recipe)
    inputs = collect_inputs(training, iterations)
    publish_collected(inputs, collect(training.start, inputs), folders.data)
    best = published(training, iterations)
    reinforce_report.report_published(run, best, validated_in(iterations), recipe)
    artifacts.publish(policy_of(iterations[best]), folders.trained, checkpoint.merged)
    (update,) = iterations[best]["update"]
    records = [
        {**record, "published": True} if record is update else record
        for iteration in iterations
        for record in in_order(iteration)
    ]
    artifacts.publish_records(records, folders.records("reinforce"))


if __name__ == "__main__":
    stage.main(reinforce_flow)

"""Train the reward model on trajectories of the cold start that a rule or a judge has scored.

Most recipes have none, so the functions that make one import torch, and all that computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefect import flow

from flows.tracking import run_figures
from flows.tracking.progress import Progress
from flows.tracking.run import Run, stage_run
from flows.workers import stage, substep_tasks
from params.run_folders import RunFolders
from params.schema.recipe import Recipe
from params.schema.reward_model import RewardModel
from tasks import recipes
from tasks.ledger import artifacts, keys
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.policy import published_model
from tasks.policy.published_model import PublishedRewardModel
from tasks.rewards import judging
from tasks.rewards.judging import VERDICTS
from tasks.tools import recording
from tasks.tools.recording import CALLS, Origin


@flow(name="reward_model")
def reward_model_flow(name: str) -> None:
    """Make ``models/<recipe>/reward_model``; without the section, a file says that there is none.

    The cold start answers training questions that have labels, with the budget and the temperature
    of training but without branches, and the model learns which answers succeeded.
    """
    recipe = recipes.load(name, Path("params"))
    folders = RunFolders(name)
    questions = Artifact.at(folders.split("train"))
    corpus = Artifact.at(folders.corpus)
    policy = Artifact.at(folders.cold_start)
    key = keys.stage_key(recipe, questions, corpus, policy)
    records: list[Record] = []
    published = None
    with (
        substep_tasks.opened() as ledger,
        stage_run(name, "reward_model", key, stage.run_tags()) as run,
    ):
        if recipe.reward_model:
            step = SubStep(name, "reward_model", 0, recipe.seed, ledger)
            records = labelled(step, recipe, policy, questions, corpus)
            trees, rewards = (
                artifacts.output(records[1], "trees"),
                artifacts.output(records[2], "rewards"),
            )
            records.append(trained(step, recipe, recipe.reward_model, policy, trees, rewards, run))
            published = PublishedRewardModel(artifacts.output(records[-1], "model"), trees, rewards)
        publish_recorded(records, folders.calls_of_reward_model)
        published_model.publish(folders.reward_model, published)
        artifacts.publish_records(records, folders.records("reward_model"))


def labelled(
    step: SubStep, recipe: Recipe, policy: Artifact, questions: Artifact, corpus: Artifact
) -> list[Record]:
    """Choose questions with labels, answer and score them; return the three records."""
    from tasks.evaluation.exam import Exam, answer
    from tasks.policy.machine import use_machine
    from tasks.recipes.opening import open_recipe, reader_of
    from tasks.reward_model import LabelInputs, labelled_questions

    assert recipe.reward_model
    use_machine(recipe.machine)
    labels = recipes.labels_of(recipe)
    record = labelled_questions(step, LabelInputs(questions, labels, recipe.reward_model.questions))
    with open_recipe(recipe, Path(corpus.path)) as environment:
        reader = reader_of(recipe, policy.path, environment)
        exam = Exam(
            recipe,
            artifacts.output(record, "questions"),
            None,
            corpus,
            environment,
            reader,
            size=len(record["questions"]),
            evaluation=False,
            training=True,
        )
        progress = Progress("labelled trees", len(record["questions"]), unit="questions")
        answered = answer(exam, step, policy, progress.advance)
        progress.close()
    return [record, *answered]


def trained(
    step: SubStep,
    recipe: Recipe,
    section: RewardModel,
    policy: Artifact,
    trees: Artifact,
    rewards: Artifact,
    run: Run,
) -> Record:
    """Train the first model with a progress bar; log its curve, its metrics and a figure."""
    from tasks.reward_model import RewardModelInputs, reward_model

    inputs = RewardModelInputs(
        policy=policy,
        before=None,
        trees=[trees],
        rewards=[rewards],
        first_batches=1,
        labels=recipes.labels_of(recipe),
        settings=section,
        steps=section.steps,
        machine=recipe.machine,
    )
    progress = Progress("reward model", section.steps, unit="steps")
    record = reward_model(step, inputs, advance=progress.reach)
    progress.close()
    for point in record["curve"]:
        run.log_metrics({"loss": point["loss"]}, step=int(point["step"]), at=record["finished"])
    run.log_metrics(record["metrics"], step=section.steps, at=record["finished"])
    if record["reliability"]:
        run.log_figure(run_figures.reliability(record["reliability"]), "reliability.png")
    print(f"reward_model: {described(record['metrics'])}")
    return record


def publish_recorded(records: Sequence[Record], folder: Path) -> None:
    """Write what tools and judges have said of the labelled trees, from which a replay reads it.

    Without trees, or where tools and scorers are repeatable, there is a table of calls without
    rows.
    """
    answered, verdicts = records[1:3], []
    calls = [Path(artifacts.output(answered[0], "trees").path, CALLS)] if answered else []
    recorded = {Origin("reward_model", 0): file for file in calls if file.exists()}
    recording.publish_calls(recorded, folder / CALLS)
    if answered:
        from tasks.evaluation.exam import verdicts_of

        verdicts.append(verdicts_of(answered))
    judging.publish_verdicts(verdicts, folder / VERDICTS)


def described(metrics: dict[str, float]) -> str:
    """Return how good a model is, in words."""
    if "calibration_error_after" not in metrics:
        return "no question is held out that could judge it: raise reward_model.questions"
    error = f"calibration error {metrics['calibration_error_after']:.3f}"
    if metrics["calibrated"]:
        error += f" (before calibration {metrics['calibration_error_before']:.3f})"
    else:
        error += (
            ", not calibrated: too few held-out trajectories, all with the same label, or failures "
            "score higher than successes"
        )
    area = f"AUC {metrics['auc']:.3f}" if "auc" in metrics else "no AUC, all labels are equal"
    return f"{area}, {error}, on {metrics['trajectories_judge']:.0f} trajectories of new questions"


if __name__ == "__main__":
    stage.main(reward_model_flow)

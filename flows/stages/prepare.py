"""Generate or read questions, corpus, SFT traces and the first policy, and check them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
from prefect import flow

from flows.tracking import gate_report
from flows.tracking.progress import Progress
from flows.tracking.run import stage_run
from flows.workers import stage, substep_tasks
from params.run_folders import RunFolders
from params.schema.agent import Agent
from params.schema.prepare import BenchmarkQuestions
from params.schema.recipe import Recipe, named_sets
from tasks import recipes
from tasks.environments import open_environment
from tasks.environments.contract import OpenEnvironment
from tasks.ledger import artifacts, keys
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.policy import local_policy
from tasks.prepare import PrepareInputs, prepare
from tasks.questions import choice
from tasks.questions.sampled import Sampled
from tasks.questions.sources import source_files
from tasks.recipes.opening import open_recipe
from tasks.rollout import RolloutInputs, rollout, told_of
from tasks.select_traces import SelectInputs, fetch_teacher, rewriting_fault, select_traces
from tasks.tools import recording
from tasks.tools.recording import CALLS, Origin
from tasks.trees import panels
from tasks.trees.panels import Panel
from tasks.trees.tables import load_questions

SAMPLED = "prepare/sampled"  # the stage of sub-steps that sample traces
EVALUATED = ("validation", "test")  # splits with a panel
PORTION = 4  # batches of an engine that are sampled between two records in the ledger


@flow(name="prepare")
def prepare_flow(name: str) -> None:
    """Fill ``data/<recipe>`` (questions, panels, corpus, traces), ``models/<recipe>/initial``."""
    recipe = recipes.load(name, Path("params"))
    sets = named_sets(recipe, Path("params"))
    sources = source_files(recipe.prepare, recipe.tools, sets)
    file = recipe.evaluate.panel
    named = panels.load(file) if file else None
    policy = local_policy.at(recipe.prepare.policy)
    inputs = PrepareInputs(
        settings=recipe.prepare,
        sets=sets,
        sources=sources,
        dialogue=recipe.dialogue,
        tools=recipe.tools,
        machine=recipe.machine,
        dialect=recipe.dialect,
        environment=recipe.environment,
        named=named_sources(recipe),
        scorers=recipes.scorer_sources(recipe, Path("params")),
        policy=policy,
    )
    others = [Artifact.at(file)] if file else []
    key = keys.stage_key(recipe, *sources, *others, *filter(None, [policy]))
    with (
        substep_tasks.opened() as ledger,
        stage_run(name, "prepare", key, stage.run_tags()) as run,
        gate_report.pages(name),
    ):
        step = SubStep(name, "prepare", 0, recipe.seed, ledger)
        opened = partial(open_environment, recipe.tools, recipe.environment, recipe.machine.threads)
        preparation = prepare(step, inputs, open_environment=opened)
        run.log_metrics(preparation["metrics"], step=0, at=preparation["finished"])
        folders = RunFolders(name)
        write_panels(recipe, artifacts.output(preparation, "questions"), named, folders.panels)
        sampled = sample_traces(step, recipe, preparation)
        of_traces = sampled[-1] if sampled else preparation
        if sampled:
            run.log_metrics(of_traces["metrics"], step=0, at=of_traces["finished"])
        artifacts.publish(artifacts.output(preparation, "questions"), folders.questions)
        artifacts.publish(artifacts.output(of_traces, "traces"), folders.traces)
        artifacts.publish(artifacts.output(of_traces, "dropped"), folders.dropped)
        artifacts.publish(artifacts.output(preparation, "corpus"), folders.corpus)
        artifacts.publish(artifacts.output(of_traces, "gates"), folders.gates("prepare"))
        artifacts.publish(artifacts.output(preparation, "initial"), folders.initial)
        recording.publish_calls(
            recorded_calls(preparation, sampled), folders.calls_of_prepare / CALLS
        )
        artifacts.publish_records([preparation, *sampled], folders.records("prepare"))


def write_panels(recipe: Recipe, questions: Artifact, named: Panel | None, folder: Path) -> None:
    """Write the panels of the validation and the test split; ``named`` is the recipe's other one.

    Raises ValueError with all tasks of ``named`` that the test split has not, or not so.
    """
    source = source_of(recipe)
    for split in EVALUATED:
        every = load_questions(Path(questions.path, f"{split}.parquet"))
        panel = panels.panel_of(every, split, source, recipe.seed)
        if named and split == "test":
            panels.questions_of(named, every, f"evaluate.panel {recipe.evaluate.panel}")
            panel = named
        panels.save(panel, folder / f"{split}.json")


def source_of(recipe: Recipe) -> str:
    """Return where a recipe's held-out tasks come from, with their sets or their world."""
    questions = recipe.prepare.questions
    sets = questions.test if isinstance(questions, BenchmarkQuestions) else ()
    return " ".join([questions.source, *sets, *recipe.environment])


def recorded_calls(preparation: Record, sampled: Sequence[Record]) -> dict[Origin, Path]:
    """Return the tables of recorded results, where tools or the world are not repeatable."""
    rollouts = [record for record in sampled if record["verb"] == "rollout"]
    tables = {
        Origin(SAMPLED, number): Path(artifacts.output(record, "trees").path, CALLS)
        for number, record in enumerate(rollouts)
    }
    if "calls" in preparation["artifacts"]:
        tables[Origin("prepare", 0)] = Path(artifacts.output(preparation, "calls").path, CALLS)
    return {origin: file for origin, file in tables.items() if file.exists()}


def named_sources(recipe: Recipe) -> dict[str, str]:
    """Return a digest of the files of all that the recipe names: world, dialect, expert, tools."""
    digests = recipes.agent_of(recipe).sources
    if recipe.prepare.expert:
        digests |= {
            f"expert {recipe.prepare.expert.kind}": choice.sources_digest(recipe.prepare.expert)
        }
    return digests


# ---------------------------------------------------------------- traces by rejection sampling


def sample_traces(step: SubStep, recipe: Recipe, preparation: Record) -> list[Record]:
    """Sample answers to training questions and keep right ones as traces; the sub-steps' records.

    ``preparation`` is the record of ``prepare``. The last record has the artifacts of the traces.
    [] where the recipe's expert is another one.
    """
    expert = recipe.prepare.expert
    if not isinstance(expert, Sampled):
        return []
    questions = Artifact.at(Path(artifacts.output(preparation, "questions").path, "train.parquet"))
    student, corpus = (artifacts.output(preparation, name) for name in ("initial", "corpus"))
    teacher, fetched = teacher_of(step, expert, student)
    agent = recipes.agent_of(recipe)
    if fault := rewriting_fault(student, teacher, agent):
        raise ValueError(fault)
    with open_recipe(recipe, Path(corpus.path)) as environment:
        sampling = Sampling(expert, agent, teacher, questions, corpus, environment)
        rolled_out = roll_out(sampling, replace(step, stage=SAMPLED))
        inputs = SelectInputs(
            trees=[artifacts.output(record, "trees") for record in rolled_out],
            expert=expert,
            agent=agent,
            student=student,
            teacher=teacher,
            questions=questions,
            context=recipe.prepare.policy.context,
            dropped=artifacts.output(preparation, "dropped"),
            gates=artifacts.output(preparation, "gates"),
            scorers=recipes.scorer_sources(recipe, Path("params")),
        )
        return [*fetched, *rolled_out, select_traces(step, inputs, specs=environment.specs)]


def teacher_of(step: SubStep, expert: Sampled, student: Artifact) -> tuple[Artifact, list[Record]]:
    """Return the policy that is sampled, and the record of its download from the hub, if any.

    Raises ValueError where it is neither a folder nor pinned.
    """
    if expert.policy is None:
        return student, []
    if expert.policy.revision is not None:
        fetched = fetch_teacher(replace(step, stage="prepare/teacher"), expert.policy)
        return artifacts.output(fetched, "policy"), [fetched]
    if not Path(expert.policy.name, "config.json").is_file():
        raise ValueError(
            f"prepare.expert.policy.name {expert.policy.name} is no folder of a policy here, and "
            "revision is null: name a folder, or set revision to a commit, which stands at "
            f"https://huggingface.co/{expert.policy.name}/commits/main"
        )
    return Artifact.at(Path(expert.policy.name)), []


@dataclass(frozen=True)
class Sampling:
    """Who is sampled on which questions."""

    expert: Sampled
    agent: Agent
    policy: Artifact
    questions: Artifact
    corpus: Artifact
    environment: OpenEnvironment


def roll_out(sampling: Sampling, step: SubStep) -> list[Record]:
    """Roll out the questions in portions, each a sub-step of its own; their records."""
    expert = sampling.expert
    available = pq.read_metadata(sampling.questions.path).num_rows
    question_count = min(expert.questions or available, available)
    portion = PORTION * (expert.rows // expert.attempts)
    progress = Progress("prepare: sampled questions", question_count)
    records = []
    for number, first in enumerate(range(0, question_count, portion)):
        size = min(portion, question_count - first)
        inputs = RolloutInputs(
            policy=sampling.policy,
            questions=sampling.questions,
            size=size,
            first=first,
            budget=expert.budget(),
            top_p=expert.top_p,
            agent=sampling.agent,
            corpus=sampling.corpus,
            told=told_of(sampling.environment),
        )
        records.append(
            rollout(
                replace(step, iteration=number),
                inputs,
                environment=sampling.environment,
                advance=progress.advance,
            )
        )
        progress.reach(first + size, {})  # of portions that the ledger had, too
    progress.close()
    return records


if __name__ == "__main__":
    stage.main(prepare_flow)

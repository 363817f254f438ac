"""Cold start, trained agent and champion on the same held-out questions, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefect import flow

from flows.tracking import figures
from flows.tracking.progress import Progress
from flows.tracking.run import stage_run
from flows.workers import stage
from params.schema import recipe as schema
from params.schema.algorithms import Marks
from params.schema.recipe import Recipe
from tasks.environments.toolbox import Respond, open_tools
from tasks.evaluate import evaluate as compare
from tasks.evaluate import success_rows, table_rows
from tasks.ledger import artifacts, keys
from tasks.ledger.artifacts import Artifact, Record, Step
from tasks.policy import champion
from tasks.policy.machine import use_machine
from tasks.reward import reward
from tasks.rollout import rollout


@flow(name="evaluate")
def evaluate(recipe: str) -> None:
    """Write ``reports/<recipe>`` (metrics and table) and ``data/<recipe>/evaluation.parquet``."""
    chosen = schema.load(recipe, Path("params"))
    models = Path("models", recipe)
    agents = {
        "cold_start": Artifact.at(models / "cold_start"),
        "trained": Artifact.at(models / "trained"),
    }
    reigning = champion.policy(models / "champion")
    if reigning:
        agents["champion"] = reigning
    questions = Artifact.at(Path("data", recipe, "questions", "test.parquet"))
    corpus = Artifact.at(Path("data", recipe, "corpus"))
    step = Step(recipe, "evaluate", 0, chosen.seed)
    use_machine(chosen.machine)
    key = keys.stage_key(chosen, questions, corpus, *agents.values())
    with (
        stage_run(recipe, "evaluate", key, stage.run_tags()) as run,
        open_tools(chosen, Path(corpus.path)) as tools,
    ):
        answered = {}
        for name, policy in agents.items():
            asked = Step(recipe, f"evaluate/{name}", 0, chosen.seed)
            answered[name] = answer(chosen, asked, policy, questions, corpus, tools)
        rewards = {name: rewards_of(records) for name, records in answered.items()}
        made = compare(step=step, settings=chosen.evaluate, **rewards)
        records = [record for some in answered.values() for record in some]
        artifacts.publish_records(
            [*records, made], Path("data", recipe, "records", "evaluate.jsonl")
        )
        reports = Path("reports", recipe)
        artifacts.publish(
            artifacts.output(made, "answers"), Path("data", recipe, "evaluation.parquet")
        )
        artifacts.publish(artifacts.output(made, "metrics"), reports / "metrics.json")
        artifacts.publish(artifacts.output(made, "table"), reports / "table.md")
        run.log_table(table_rows(made["rows"]), "evaluation.json")
        run.log_figure(figures.success_by_kind(success_rows(made["rows"])), "success_by_kind.png")


def answer(
    recipe: Recipe,
    step: Step,
    policy: Artifact,
    questions: Artifact,
    corpus: Artifact,
    tools: Respond,
) -> list[Record]:
    """One agent answers the held-out questions once each; its rollout's and its reward's record."""
    progress = Progress(step.stage, recipe.evaluate.questions)
    rolled_out = rollout(
        step=step,
        policy=policy,
        questions=questions,
        size=recipe.evaluate.questions,
        first=0,
        attempt=0,
        branching="none",
        marks=Marks(kind="none"),
        budget=recipe.single_answers(),
        top_p=recipe.evaluate.top_p,
        dialogue=recipe.dialogue,
        engine=recipe.engine,
        machine=recipe.machine,
        limits=recipe.python,
        search=recipe.search,
        corpus=corpus,
        tools=tools,
        advance=progress.advance,
    )
    progress.close()
    trees = artifacts.output(rolled_out, "trees")
    rewarded = reward(
        step=step,
        trees=trees,
        settings=recipe.reinforce.reward,
        overlong=None,
        response_tokens=recipe.dialogue.response_tokens,
    )
    return [rolled_out, rewarded]


def rewards_of(answered: Sequence[Record]) -> Artifact:
    """The scored answers among what ``answer`` returns."""
    return artifacts.output(answered[-1], "rewards")


if __name__ == "__main__":
    stage.main(evaluate)
